"""A snapshot's memory on its way into restored processes with an interposer.

Neither waits for the other: gpucr makes the memory on the GPUs that it goes to, and fills it, while CRIU works. The
processes are given what is there when the driver has brought back the rest.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Mapping, Sequence

from gpucr.driver.api import Driver
from gpucr.errors import InterposerError
from gpucr.gpu_state.backend import WaitForBytes
from gpucr.gpu_state.interposed.blocks import writes
from gpucr.gpu_state.interposed.coming_back import let_continue
from gpucr.gpu_state.interposed.host_copy import require_sizes
from gpucr.gpu_state.interposed.line import Line, spoken, unlocked
from gpucr.gpu_state.interposed.shared import share_again
from gpucr.gpu_state.interposed.work import Work
from gpucr.interposer.client import Agent, Held
from gpucr.interposer.protocol import Block, Flag
from gpucr.interposer.sharing import Part, Share
from gpucr.interposer.vault import Shown, Vault, Vaults
from gpucr.model import DevicePart, StagedExtent


class BlocksDestination:
    """See `Destination`: new memory on GPUs, one piece for each extent. Raises VaultFailed."""

    is_zeroed = True

    def __init__(self, part: DevicePart, extents: Sequence[StagedExtent], places: Sequence[tuple[Vault, bool]]) -> None:
        """``places``: for each extent a vault, and whether it is pinned host memory."""
        self.part = part
        self.size_bytes = extents[-1].offset + extents[-1].size_bytes
        self._offsets = [extent.offset for extent in extents]
        self._made: list[tuple[Vault, Shown]] = []
        self._sealed: list[int] = []
        try:
            for extent, (vault, on_host) in zip(extents, places, strict=True):
                self._made.append((vault, vault.make(extent.size_bytes, on_host=on_host)))
        except BaseException:
            self.close()
            raise

    def write_from(self, position: int, data: memoryview) -> None:
        """Through the vault of its GPU."""
        number = bisect.bisect_right(self._offsets, position) - 1
        while data:
            vault, shown = self._made[number]
            within = position - self._offsets[number]
            size = min(len(data), shown.size_bytes - within)
            vault.write_from(shown.address + within, data[:size])
            position, data, number = position + size, data[size:], number + 1

    def fills(self, address: int) -> list[Callable[[], None]]:
        """Copies that fill all of it from the host memory at this address, in pieces."""
        return [
            work
            for offset, (vault, shown) in zip(self._offsets, self._made, strict=True)
            for work in writes(vault, shown, address + offset)
        ]

    def seal(self) -> None:
        """All is written: from here on descriptors hold the memory, and the vaults are not needed. Idempotent.

        Raises VaultFailed.
        """
        while self._made:
            vault, shown = self._made[0]
            self._sealed.append(vault.export(shown))
            del self._made[0]
            vault.forget(shown)

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
        while self._made:
            vault, shown = self._made.pop()
            vault.forget(shown)


class MadeMeanwhile:
    """A `BlocksDestination` made by a thread, so CRIU need not wait for the context, which takes 0.3 s."""

    is_zeroed = BlocksDestination.is_zeroed

    def __init__(
        self, part: DevicePart, extents: Sequence[StagedExtent], make: Callable[[], BlocksDestination]
    ) -> None:
        self.part = part
        self.size_bytes = extents[-1].offset + extents[-1].size_bytes
        self._work = Work(make)

    def get(self) -> BlocksDestination:
        """Wait until it is made. Raises what making it raised."""
        return self._work.wait()

    def write_from(self, position: int, data: memoryview) -> None:
        """See `Destination`."""
        self.get().write_from(position, data)

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
        """The vaults."""
        self._vaults.close()
