"""Who takes device memory out of a gang's processes first, and who gives it back first.

All processes go through this together: none runs while another's memory is away. Each has a stack of backends, one for
each kind of `Holders` that takes some of its memory. Level 0 has what the driver's own calls move.

    | moment                  | the processes | what is done                                            |
    |-------------------------|---------------|---------------------------------------------------------|
    | `prepare`               | run           | each backend makes room, from the highest level down    |
    | `settle`                | run           | what cannot be held after all is left to level 0        |
    | `taken`, at its start   | locked        | `begin`, from the highest level down, each away before  |
    |                         |               | the next level begins                                   |
    | in its block            | checkpointed  | the driver's checkpoint                                 |
    | `taken`, at its end     | checkpointed  | `complete`: what is held is final; or `abort` of all    |
    | `adopt`                 | checkpointed  | what a process keeps since an earlier suspend           |
    | `Gang.restore`          | checkpointed  | `bring_back`: who has it without the driver             |
    |                         | checkpointed  | `make_way`: nothing of ours is in the driver's way      |
    |                         | locked        | the driver's restore                                    |
    | `Gang.unlock`           | locked        | `give_back`, from the lowest level up; then, of each    |
    |                         |               | kind, `given_back`; only then the first process runs    |

After a suspend, gpucr ends. What is away is with the processes then, and `SuspendedStorage` and `SuspendedBlocks` give
it back in the same order. When gpucr is killed, its guard does (`recovery`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence

from gpucr.errors import GpucrError
from gpucr.gang import Gang
from gpucr.gang.around import AllAround
from gpucr.gpu_state import staging
from gpucr.gpu_state.backend import Backend, Stored
from gpucr.gpu_state.holders import Holders, StateOf
from gpucr.gpu_state.room import ROOM_LIMIT_S, total_of, wait_for_room
from gpucr.gpu_state.source import Saver, Source
from gpucr.model import CudaState, DevicePart
from gpucr.undo.steps import Meter

GENTLE_THREADS = 4
"""How many threads save while a job that will continue is stopped: enough for a disk, without slowing the driver.

Measured (H200 machine, 16 processors, 24 GiB): with all threads CRIU took 0.8 to 1.2 s instead of 0.1, and the job was
stopped for 9.6 s instead of 8.4.
"""

FOLLOW_INTERVAL_S = 0.02
"""How often to check the driver's progress: at 6 GiB/s it fills 120 MiB in that time."""


class Saves:
    """Tells a writer what is held, as it arrives. With ``gently`` it then uses few processors until somebody waits."""

    def __init__(self, writer: Saver | None, *, gently: bool = False) -> None:
        self._writer = writer
        self._gently = gently
        self._known_bytes: dict[DevicePart, int] = {}

    def look_at(self, backend: Backend) -> int:
        """Save what is ready of it. Returns how much that is, in bytes."""
        available_bytes = backend.available_bytes()
        if available_bytes and self._writer is not None and (source := backend.source) is not None:
            self._up_to(self._writer, source)
            self._writer.advance(backend.part, available_bytes)
        return available_bytes

    def all_of(self, stored: Stored) -> None:
        """Its source is final: save the rest."""
        if self._writer is not None and stored.extents and (source := stored.source) is not None:
            self._up_to(self._writer, source)
            if self._gently:
                self._writer.limit_threads(GENTLE_THREADS)
            self._writer.complete(stored.part)

    def _up_to(self, writer: Saver, source: Source) -> None:
        """Tell the writer about a part, and about its growth (staging that the driver asked for later)."""
        if source.part not in self._known_bytes:
            writer.add(source)
        elif source.size_bytes > self._known_bytes[source.part]:
            writer.grow(source)
        self._known_bytes[source.part] = source.size_bytes


class Order(AllAround):
    """Leads the backends of all processes.

    ``above`` are the kinds over the driver's, from the lowest level up. ``lowest`` are those of level 0: the first that
    takes a process holds its memory there, and the last must. ``needs``: what the driver's restore needs, by pid and
    GPU UUID.
    """

    def __init__(
        self,
        lowest: Sequence[Holders],
        above: Sequence[Holders] = (),
        *,
        needs: Mapping[int, Mapping[str, int]] | None = None,
        saves: Saves | None = None,
    ) -> None:
        super().__init__(*above, *lowest)
        self._lowest = tuple(lowest)
        self._above = tuple(above)
        self._needs = needs or {}
        self._saves = saves or Saves(None)
        self._sizes: dict[int, int] = {}
        self._stacks: dict[int, tuple[Backend, ...]] = {}  # lowest level first
        self._kept: dict[int, tuple[Stored, ...]] = {}
        self._error: BaseException | None = None

    @property
    def _holders(self) -> tuple[Holders, ...]:
        return (*self._above, *self._lowest)

    @property
    def saved_bytes(self) -> int:
        """Device memory known to be away that is not in CRIU's images, in bytes."""
        return sum(staging.total_bytes(each.extents) for each in self.saved())

    def saved(self) -> list[Stored]:
        """All sources, when all are complete; a process's levels ascend."""
        return [each for each in self._stored() if each.extents]

    def final_places(self, pids: Sequence[int]) -> dict[int, str]:
        """By pid, in words, where memory goes of processes for which that cannot be called off once begun."""
        found = {pid: next(filter(None, (each.final_place(pid) for each in self._holders)), None) for pid in pids}
        return {pid: place for pid, place in found.items() if place is not None}

    def prepare(self, sizes: Mapping[int, int]) -> None:
        """Make room for the device memory of these processes (pid → bytes), while they still run."""
        self._sizes.update(sizes)
        for pid, size_bytes in sizes.items():
            left_bytes = size_bytes
            for each in reversed(self._stack(pid)):
                left_bytes -= each.prepare(left_bytes)

    def settle(self) -> None:
        """After `prepare`, while they still run: leave to level 0 what a backend cannot hold after all."""
        for gone in [each for holders in self._above for each in holders.withdrawn()]:
            pid = gone.part.pid
            self._stacks[pid] = tuple(each for each in self._stack(pid) if each is not gone)
            self._stacks[pid][0].prepare(self._sizes.get(pid, 0))

    def wait_prepared(self) -> None:
        """Wait until `prepare`'s work is done."""
        for each in self._backends():
            each.wait_prepared()

    def adopt(self, pid: int, meter: Meter) -> None:
        """Save what a process suspended earlier keeps of its memory. Raises GpucrError, OSError."""
        if pid in self._kept:
            return
        found = [each.kept_by(pid, meter) for each in reversed(self._holders)]
        self._kept[pid] = tuple(each for each in found if each is not None)
        for kept in self._kept[pid]:
            self._saves.all_of(kept)

    @contextlib.contextmanager
    def taken(self, restore_threads: Mapping[int, int], meter: Meter, deadline: float | None = None) -> Iterator[None]:
        """The driver checkpoints these LOCKED processes (pid → restore thread) in the block.

        Before it, the backends above the driver's take their memory, level by level. After it everything can be read.
        """
        backends = [each for pid in restore_threads for each in self._stack(pid)]
        for holders in self._holders:
            for note in filter(None, map(holders.note, restore_threads)):
                meter.note(note)
        over = threading.Event()
        follower = threading.Thread(target=self._follow, args=(backends, meter, over), name="follow", daemon=True)
        try:
            for level in sorted({each.part.level for each in backends}, reverse=True):
                beginning = [each for each in backends if each.part.level == level]
                for each in beginning:
                    each.begin(restore_threads[each.part.pid], meter, deadline)
                for each in beginning:
                    each.wait_started()
            follower.start()
            yield
            self._stop(follower, over)
            for each in backends:
                each.complete(meter)
            for each in backends:
                self._saves.all_of(each)
        except BaseException:
            self._stop(follower, over, raises=False)
            for each in backends:
                each.abort()
            raise

    def before_restore(self, gang: Gang, pids: Sequence[int]) -> None:
        self.make_way()
        wait_for_room(total_of(self._needs, pids), ROOM_LIMIT_S)

    def make_way(self) -> None:
        """The driver is about to restore processes of the gang."""
        for each in self._backends():
            each.make_way()

    def before_unlock(self, gang: Gang) -> None:
        self.give_back(gang.state)

    def give_back(self, state: StateOf) -> None:
        """The backends above the driver's put their memory back into the processes that the driver has restored.

        Tries every backend. Raises the first error.
        """
        errors: list[GpucrError | OSError] = []
        over = [each for each in self._backends() if each.part.level]
        for each in sorted(over, key=lambda backend: backend.part.level):
            try:
                if state(each.part.pid) not in (CudaState.CHECKPOINTED, None):
                    each.give_back()
            except (GpucrError, OSError) as error:  # the others have memory to give back too
                errors.append(error)
        if errors:
            raise errors[0]
        for holders in self._holders:
            holders.given_back(state)

    def close(self) -> None:
        for stored in self._stored():
            stored.close()
        for holders in self._holders:
            holders.close()

    def _stored(self) -> list[Stored]:
        return [*self._backends(), *(each for kept in self._kept.values() for each in kept)]

    def _backends(self) -> list[Backend]:
        return [each for stack in self._stacks.values() for each in stack]

    def _stack(self, pid: int) -> tuple[Backend, ...]:
        if pid not in self._stacks:
            found = (holders.backend_for(DevicePart(pid)) for holders in self._lowest)
            stack = [next(each for each in found if each is not None)]
            for holders in self._above:
                if (backend := holders.backend_for(DevicePart(pid, len(stack)))) is not None:
                    stack.append(backend)
            self._stacks[pid] = tuple(stack)
        return self._stacks[pid]

    def _stop(self, follower: threading.Thread, over: threading.Event, *, raises: bool = True) -> None:
        over.set()
        if follower.ident is not None:
            follower.join()
        if raises and self._error is not None:
            raise self._error

    def _follow(self, backends: Sequence[Backend], meter: Meter, over: threading.Event) -> None:
        """Report the backends' progress to meter and writer until the driver is done."""
        try:
            while not over.wait(FOLLOW_INTERVAL_S):
                meter.set(sum(self._saves.look_at(each) for each in backends))
        except BaseException as error:  # noqa: BLE001 - raised when the driver is done: its call cannot be cancelled
            self._error = error
