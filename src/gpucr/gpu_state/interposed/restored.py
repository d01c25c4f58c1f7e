"""A snapshot's memory on its way into restored processes with an interposer.

Neither waits for the other: gpucr makes the memory on the GPUs that it goes to, and fills it, while CRIU works. The
processes are given what is there when the driver has brought back the rest.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpucr.driver.api import Driver
from gpucr.errors import InterposerError
from gpucr.gpu_state.backend import WaitForBytes
from gpucr.gpu_state.interposed.blocks import writes
from gpucr.gpu_state.interposed.coming_back import let_continue
from gpucr.gpu_state.interposed.host_copy import require_sizes
from gpucr.gpu_state.interposed.line import Line, spoken, unlocked
from gpucr.gpu_state.interposed.shared import share_again
from gpucr.interposer.client import Agent, Held
from gpucr.interposer.digests import PieceDigests
from gpucr.interposer.protocol import Block, Flag
from gpucr.interposer.sharing import Part, Share
from gpucr.interposer.vault import Shown, Vault, VaultFailed, Vaults
from gpucr.linux.work import Work
from gpucr.model import DevicePart, StagedExtent


class _Run(NamedTuple):
    """Neighbouring extents on one GPU: where they begin in the source, and their memory."""

    start: int
    vault: Vault
    made: Shown


class BlocksDestination:
    """See `Destination`, `ChecksItself`: new memory on GPUs, one piece for each extent. Raises VaultFailed."""

    is_zeroed = True

    def __init__(self, part: DevicePart, extents: Sequence[StagedExtent], places: Sequence[tuple[Vault, bool]]) -> None:
        """``places``: for each extent a vault, and whether it is pinned host memory."""
        self.part = part
        self.size_bytes = extents[-1].offset + extents[-1].size_bytes
        self._runs: list[_Run] = []
        self._sealed: list[int] = []
        try:
            both = zip(extents, places, strict=True)
            for (vault, _), group in itertools.groupby(both, lambda each: each[1]):
                wanted = [(extent.size_bytes, on_host, extent.offset) for extent, (_, on_host) in group]
                made = vault.make_all([(size_bytes, on_host) for size_bytes, on_host, _ in wanted])
                self._runs.append(_Run(wanted[0][2], vault, made))
        except BaseException:
            self.close()
            raise

    def write_from(self, position: int, data: memoryview) -> None:
        """Through the vault of its GPU."""
        number = bisect.bisect_right([run.start for run in self._runs], position) - 1
        while data:
            run = self._runs[number]
            within = position - run.start
            size = min(len(data), run.made.size_bytes - within)
            run.vault.write_from(run.made.address + within, data[:size])
            position, data, number = position + size, data[size:], number + 1

    def differing(self, piece_bytes: int, key: bytes | None, digests: Sequence[bytes]) -> list[int]:
        """By digests that the GPUs compute. A piece that lies on two of them differs; without room for that, all do."""
        right: set[int] = set()
        lengths = {min(piece_bytes, self.size_bytes), self.size_bytes % piece_bytes or piece_bytes}
        for run in self._runs:
            end = run.start + run.made.size_bytes
            first, last = -(-run.start // piece_bytes), len(digests) if end >= self.size_bytes else end // piece_bytes
            start, size = first * piece_bytes, min(last * piece_bytes, self.size_bytes) - first * piece_bytes
            if size <= 0:
                continue
            with contextlib.suppress(VaultFailed):
                named = PieceDigests(run.vault, piece_bytes, key, lengths)
                try:
                    found = named.of(run.made.address + start - run.start, size)
                finally:
                    named.close()
                right.update(number for number, digest in enumerate(found, first) if digest == digests[number])
        return [number for number in range(len(digests)) if number not in right]

    def fills(self, address: int) -> list[Callable[[], None]]:
        """Copies that fill all of it from the host memory at this address, in pieces."""
        return [work for run in self._runs for work in writes(run.vault, run.made, address + run.start)]

    def seal(self) -> None:
        """All is written: from here on descriptors hold the memory, and the vaults are not needed. Idempotent.

        Raises VaultFailed.
        """
        while self._runs:
            run = self._runs[0]
            self._sealed += [run.vault.export(run.made, number) for number in range(len(run.made.parts))]
            del self._runs[0]
            run.vault.forget(run.made)

    def hand_over(self, agent: Agent, blocks: Sequence[Block]) -> None:
        """Give the memory to the process for these blocks, which are away. LOCKED, except for the agent.

        Raises Refused, BadAnswer, VaultFailed, OSError.
        """
        self.seal()
        held = [Held(block, descriptor) for block, descriptor in zip(blocks, self._sealed, strict=True)]
        self._sealed = []
        try:
            agent.give_back(held, renew=False)
        finally:
            for each in held:
                each.close()

    def close(self) -> None:
        """Free what was not given away. Idempotent."""
        while self._sealed:
            os.close(self._sealed.pop())
        while self._runs:
            run = self._runs.pop()
            run.vault.forget(run.made)


class MadeMeanwhile:
    """A `BlocksDestination` made by a thread, so CRIU need not wait for the context, which takes 0.3 s."""

    is_zeroed = BlocksDestination.is_zeroed

    def __init__(
        self, part: DevicePart, extents: Sequence[StagedExtent], make: Callable[[], BlocksDestination]
    ) -> None:
        self.part = part
        self.size_bytes = extents[-1].offset + extents[-1].size_bytes
        self._work = Work(make, "vault")

    def get(self) -> BlocksDestination:
        """Wait until it is made. Raises what making it raised."""
        return self._work.wait()

    def write_from(self, position: int, data: memoryview) -> None:
        self.get().write_from(position, data)

    def differing(self, piece_bytes: int, key: bytes | None, digests: Sequence[bytes]) -> list[int]:
        return self.get().differing(piece_bytes, key, digests)

    def close(self) -> None:
        """Free the memory that was given to nobody. Idempotent."""
        for made in self._work.results():
            made.close()


class BlocksReturn:
    """See `Return`. The process was made by CRIU: its gate is closed, and all of its memory is away."""

    note = None

    def __init__(self, driver: Driver, destination: MadeMeanwhile, extents: Sequence[StagedExtent]) -> None:
        self.destination = destination
        self._driver = driver
        self._sizes = [extent.size_bytes for extent in extents]
        self.line: Line | None = None

    def begin(self, pid: int, restore_thread: int, wait: WaitForBytes, *, stays: bool) -> None:
        """LOCKED → LOCKED, with its memory in place."""
        wait(self.destination.size_bytes)
        self.line = line = Line(pid)
        with spoken(pid, "take its memory back"), unlocked(self._driver, pid):
            away = [each for each in line.agent.blocks() if each.flags & Flag.AWAY and not each.flags & Flag.IMPORTED]
            require_sizes(pid, away, self._sizes)
            self.destination.get().hand_over(line.agent, away)

    def finish(self) -> None:
        """It has its own memory; its gate opens when all have everything (`RestoredBlocks.go_on`)."""

    def close(self) -> None:
        """Free memory that was not given away, and the connection."""
        if self.line is not None:
            self.line.hang_up()
        self.destination.close()


class RestoredBlocks:
    """Brings memory of kind `interposed` back. ``new_uuid``: where a GPU's memory goes."""

    def __init__(self, driver: Driver, new_uuid: Callable[[str], str]) -> None:
        self._driver = driver
        self._new_uuid = new_uuid
        self._vaults = Vaults(pin_rings=False)  # what is read is in buffers that can be pinned themselves, as a rule
        self._returns: list[BlocksReturn] = []

    def return_for(self, part: DevicePart, extents: Sequence[StagedExtent]) -> BlocksReturn:
        """For what one process held."""
        uuids = [self._new_uuid(extent.gpu) if extent.gpu is not None else None for extent in extents]
        on_gpu = next((uuid for uuid in uuids if uuid is not None), None)
        if on_gpu is None:
            raise InterposerError(f"the snapshot does not say which GPUs process {part.pid} had its memory on")

        def make() -> BlocksDestination:
            return BlocksDestination(part, extents, [(self._vaults.of(uuid or on_gpu), uuid is None) for uuid in uuids])

        made = BlocksReturn(self._driver, MadeMeanwhile(part, extents, make), extents)
        self._returns.append(made)
        return made

    @property
    def is_filling(self) -> bool:
        """Whether there is memory to fill, for which our contexts are open."""
        return bool(self._returns)

    def wait_made(self) -> None:
        """Wait until all memory has been made, filled or not. Raises VaultFailed, also where there is no room."""
        for each in self._returns:
            each.destination.get()

    def make_way(self, wait_for: Callable[[DevicePart], WaitForBytes]) -> None:
        """Wait until all is filled, and free what our contexts take on the GPUs.

        Raises what waiting raises, VaultFailed.
        """
        for each in self._returns:
            wait_for(each.destination.part)(each.destination.size_bytes)
            each.destination.get().seal()
        self._vaults.close()

    def go_on(self, pids: Mapping[int, int], shares: Sequence[Share]) -> None:
        """All have their own memory: each gets what it shared, and the gates open. LOCKED → LOCKED.

        ``pids``: the current pid for each of the snapshot's. Raises InterposerError, JobChanged, DriverError.
        """
        lines = {each.line.pid: each.line for each in self._returns if each.line is not None}
        here = [Share(*(Part(pids[p.pid], p.index, p.generation) for p in (s.imported, s.owner))) for s in shares]
        only_importers = {each.imported.pid for each in here} - lines.keys()
        lines |= {pid: Line(pid) for pid in only_importers}
        try:
            share_again(self._driver, list(lines.values()), {}, here)
            for line in lines.values():
                let_continue(line)
        finally:
            for line in lines.values():
                line.hang_up()

    def close(self) -> None:
        self._vaults.close()
