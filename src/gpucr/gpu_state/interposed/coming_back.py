"""Restore a process's memory that is away, from descriptors or from what the process keeps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from gpucr.driver.api import Driver
from gpucr.errors import InterposerError
from gpucr.gpu_state.interposed.blocks import HostRoom, can_leave, extents_of, gpu_of, vault_of, writes
from gpucr.gpu_state.interposed.line import Line, spoken, unlocked
from gpucr.gpu_state.interposed.shared import by_part, share_again
from gpucr.gpu_state.interposed.silent import left_to_driver
from gpucr.interposer.client import Agent, Held
from gpucr.interposer.protocol import BadAnswer, Block, Code, Flag, Refused
from gpucr.interposer.vault import Shown, Vault, Vaults, in_parallel
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import StagedExtent


def give_back(agent: Agent, held: Sequence[Held], *, renew: bool = False) -> None:
    """Map memory again (see `Agent.give_back`); what is back already is skipped."""
    left = [each for each in held if each.descriptor >= 0]
    while left:
        try:
            agent.give_back(left, renew=renew)
        except Refused as e:
            left = [each for each in left if each.descriptor >= 0]
            if e.code != Code.NOT_AWAY or not left:
                raise
            left.pop(0).close()
        else:
            return


class Filled(Protocol):
    """New memory filled with the bytes that a process keeps (`restored.BlocksDestination`)."""

    def hand_over(self, agent: Agent, blocks: Sequence[Block]) -> None:
        """Give it to the process."""


def bring_back(
    driver: Driver,
    line: Line,
    uuids: Sequence[str],
    vaults: Vaults,
    held: Sequence[Held] = (),
    *,
    filled: Filled | None = None,
    renew: bool = False,
) -> None:
    """Bring back a process's memory from these descriptors, or from what the process keeps. LOCKED → LOCKED.

    ``filled``: memory filled with what it keeps. ``renew``: see `Agent.give_back`.

    The gate stays closed, and the process keeps its copy, until `let_continue`. Does nothing if nothing is away. Raises
    InterposerError, VaultFailed, JobChanged, DriverError; memory that is not back yet is where it was.
    """
    with spoken(line.pid, "take its memory back"), contextlib.ExitStack() as opened:
        agent = line.agent
        kept = agent.fetch()
        file = StagingFile.adopt(kept) if kept is not None else None
        if file is not None:
            opened.callback(file.close)
        elif not agent.status().away:  # the gpucr that was about to take it was killed: the gate may be open already
            return
        opened.enter_context(unlocked(driver, line.pid))
        give_back(agent, held, renew=renew)
        blocks = [each for each in agent.blocks() if can_leave(each)]
        if filled is not None and all(each.flags & Flag.AWAY for each in blocks):
            filled.hand_over(agent, blocks)
        elif file is not None:
            _fill(agent, blocks, file, uuids, vaults)
        elif any(each.flags & Flag.AWAY for each in blocks):
            raise InterposerError(
                f"device memory of process {line.pid} is away, and nobody has it",
                hint="the gpucr that took it was killed together with its guard: end the job",
            )


class GoesOn(NamedTuple):
    """A LOCKED process, the GPUs that it sees, and what we hold of it."""

    line: Line
    uuids: Sequence[str]
    held: Sequence[Held]


def bring_all_back(driver: Driver, back: Sequence[GoesOn], ended: Sequence[tuple[int, Sequence[Held]]]) -> None:
    """Each gets its own memory, then what it shared, then all continue. LOCKED → LOCKED, gates open.

    ``ended``: what we hold of processes that have ended, by pid. Raises as `bring_back` and `share_again`.
    """
    vaults = Vaults()
    try:
        for each in back:
            bring_back(driver, each.line, each.uuids, vaults, each.held)
        held = {part: one for pid, those in ended for part, one in by_part(pid, those).items()}
        share_again(driver, [each.line for each in back], held)
        for each in back:
            let_continue(each.line)
    finally:
        for each in back:
            each.line.hang_up()
        vaults.close()


def let_continue(line: Line) -> None:
    """Everything is back: free what the process keeps, and open its gate. Now the driver's lock holds it."""
    with spoken(line.pid, "open its gate"):
        line.agent.keep(None)
    line.hang_up()


def take_out_again(driver: Driver, pid: int) -> None:
    """Take away again what has come back from what the process keeps, so that the driver can checkpoint it.

    LOCKED → LOCKED. Does nothing if nothing is kept: then the driver takes all of it. Raises InterposerError for a
    process that shares others' memory and keeps nothing: the driver would lose it.
    """
    if left_to_driver(pid):
        return
    line = Line(pid)
    try:
        with spoken(pid, "let its memory go again"):
            kept = line.agent.fetch()
            if kept is None and line.agent.status().imported:
                raise InterposerError(
                    f"process {pid} has memory of other processes again, and cannot be suspended alone",
                    hint=f"`gpucr resume {pid}` continues it with the others",
                )
            if kept is None:
                return
            os.close(kept)
            with unlocked(driver, pid):
                for batch in line.agent.export():
                    for each in batch:
                        each.close()
                line.agent.drop(imported_too=True)
    finally:
        line.hang_up()


def _fill(agent: Agent, blocks: Sequence[Block], file: StagingFile, uuids: Sequence[str], vaults: Vaults) -> None:
    """New memory for what is away, and all bytes from the file: existing memory may be filled only partly.

    If the GPU has no room for a vault beside the process, it copies the bytes itself.
    """
    places = {
        (block.index, block.generation): extent for block, extent in zip(blocks, extents_of(blocks, uuids), strict=True)
    }
    size_bytes = sum(block.size_bytes for block in blocks)
    if file.size_bytes != size_bytes:
        raise BadAnswer(f"it keeps {file.size_bytes} bytes of {size_bytes}")
    if not blocks:
        return
    for made in agent.create([block for block in blocks if block.flags & Flag.AWAY]):
        for each in made:
            each.close()
    if not vaults.try_all({gpu_of(block, uuids) or uuids[0] for block in blocks}):
        agent.fill(blocks, 0)
        return
    room = HostRoom(file, size_bytes)
    try:
        for there in agent.export():
            _fill_these(there, places, room.address, uuids, vaults)
    finally:
        room.close()


def _fill_these(
    there: Sequence[Held],
    places: Mapping[tuple[int, int], StagedExtent],
    address: int,
    uuids: Sequence[str],
    vaults: Vaults,
) -> None:
    seen: list[tuple[Vault, Shown]] = []
    try:
        work: list[Callable[[], None]] = []
        for each in there:
            vault = vault_of(vaults, each.block, uuids)
            shown = vault.see(each.descriptor, each.block.size_bytes)
            seen.append((vault, shown))
            work += writes(vault, shown, address + places[each.block.index, each.block.generation].offset)
        in_parallel(work)
    finally:
        for vault, shown in seen:
            vault.forget(shown)
        for each in there:
            each.close()
