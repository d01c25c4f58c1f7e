"""The steps that take a gang off the GPU and back on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from gpucr import gang as gangs
from gpucr import staging
from gpucr.errors import CudaStarted
from gpucr.gang import Gang
from gpucr.linux import memory, processes
from gpucr.model import CudaState, Extent, GangMember, GpuMap
from gpucr.operations.interrupts import Interrupts
from gpucr.operations.threads import GangThreads

MAX_ROUNDS = 5
"""How often processes that begin to use CUDA meanwhile are taken in before the attempt is given up."""


class LockGang:
    """RUNNING → LOCKED for all. Undone by unlocking what was found RUNNING."""

    name = "lock"

    def __init__(self, gang: Gang) -> None:
        self._gang = gang

    def describe(self) -> str:
        """What will be locked."""
        return f"lock the CUDA work of {_names(self._gang)}"

    def run(self, interrupts: Interrupts) -> int:
        """Lock all members that run."""
        self._gang.lock()
        return 0

    def undo(self) -> None:
        """Every member back to where it was found: this is the first step, so nothing may be left of any."""
        self._gang.return_to_found()


class CheckpointGang:
    """LOCKED → CHECKPOINTED for all, and for those that begin to use CUDA while this goes on.

    ``staging`` maps each pid to the extents that its checkpoint added, ``restore_threads`` to the thread that does the
    driver's work. With ``threads`` all others are held meanwhile, and left stopped for CRIU.
    """

    name = "checkpoint"

    def __init__(
        self, gang: Gang, root_pid: int, *, whole_tree: bool = True, threads: GangThreads | None = None
    ) -> None:
        self._gang = gang
        self._root_pid = root_pid
        self._whole_tree = whole_tree
        self._threads = threads
        self.staging: dict[int, tuple[Extent, ...]] = {}
        self.restore_threads: dict[int, int] = {}

    def describe(self) -> str:
        """What will be checkpointed."""
        return f"checkpoint {_names(self._gang)}: device memory to host memory, GPUs released"

    def run(self, interrupts: Interrupts) -> int:
        """Checkpoint until the tree has no CUDA process that still runs (at most MAX_ROUNDS rounds)."""
        for _ in range(MAX_ROUNDS):
            if self._threads is not None:
                self.restore_threads = self._gang.restore_threads()
                self._threads.hold(self.restore_threads)
            self._checkpoint_and_locate()
            late = self._late_members()
            if not late:
                if self._threads is not None:
                    self._threads.stop()
                return sum(staging.total_bytes(extents) for extents in self.staging.values())
            interrupts.check()
            self._gang.add(late)
            self._gang.lock()
        raise CudaStarted(
            f"new processes kept starting to use CUDA for {MAX_ROUNDS} rounds",
            pids=[member.pid for member in self._late_members()],
            hint="wait until the job has started all of its processes, then try again",
        )

    def undo(self) -> None:
        """CHECKPOINTED → LOCKED for what was not found CHECKPOINTED; unlocking is LockGang's undo."""
        if self._threads is not None and self._threads.are_stopped:
            self._threads.hold_again()
        try:
            self._gang.restore(down_to=lambda member: member.found)
        finally:
            if self._threads is not None:
                self._threads.release()

    def _checkpoint_and_locate(self) -> None:
        locked = [m.pid for m in self._gang.members if self._gang.state(m.pid) is CudaState.LOCKED]
        before = {pid: _maps_if_alive(pid) for pid in locked}
        self._gang.checkpoint()
        for pid, maps in before.items():
            self.staging[pid] = staging.locate(maps, _maps_if_alive(pid))

    def _late_members(self) -> list[GangMember]:
        known = {member.id for member in self._gang.members}
        tree = processes.tree(self._root_pid) if self._whole_tree else ()
        # Members are not asked: their threads are held by now, which looks like a process that cannot answer.
        return list(gangs.discover(self._gang.driver, [process for process in tree if process.id not in known]))


class HoldThreads:
    """Stopped, as CRIU leaves the tree → only the driver's restore threads run (see threads.py)."""

    name = "hold"

    def __init__(self, threads: GangThreads, free_threads: Callable[[], Mapping[int, int]] | None = None) -> None:
        self._threads = threads
        self._free_threads = free_threads

    def describe(self) -> str:
        """What is held."""
        return "hold all threads but the driver's until device memory is back"

    def run(self, interrupts: Interrupts) -> int:
        """Hold the threads, then end the stop, which lets only the restore threads go on."""
        if self._free_threads is None:
            self._threads.hold_again()
        else:
            self._threads.hold(self._free_threads())
            self._threads.continue_stopped()
        return 0

    def undo(self) -> None:
        """Let the threads go on."""
        self._threads.release()


class ReleaseThreads:
    """The whole tree runs: held threads are let go, and what is only stopped goes on."""

    name = "release"

    def __init__(self, threads: GangThreads, stopped: Callable[[], Iterable[int]] = tuple) -> None:
        self._threads = threads
        self._stopped = stopped

    def describe(self) -> str:
        """What goes on."""
        return "let all threads go on"

    def run(self, interrupts: Interrupts) -> int:
        """Release the held threads and end the stop of the processes without CUDA."""
        self._threads.release()
        processes.continue_stopped(self._stopped())
        return 0

    def undo(self) -> None:
        """Nothing: a running process is where every undo wants it."""


class RestoreGang:
    """CHECKPOINTED → LOCKED for the members whose ``down_to`` state is below CHECKPOINTED."""

    name = "restore"

    def __init__(self, gang: Gang, gpu_map: GpuMap | None, *, down_to: Callable[[GangMember], CudaState]) -> None:
        self._gang = gang
        self._gpu_map = gpu_map
        self._down_to = down_to

    def describe(self) -> str:
        """What will be restored, and where to."""
        where = f" with the GPU map {self._gpu_map}" if self._gpu_map else ""
        return f"restore {_names(self._gang)}: host memory to device memory{where}"

    def run(self, interrupts: Interrupts) -> int:
        """Restore all members that are checkpointed."""
        self._gang.restore(self._gpu_map, down_to=self._down_to)
        return 0

    def undo(self) -> None:
        """Every member back to where it was found (checkpointed again, if that is where it was)."""
        self._gang.return_to_found()


class UnlockGang:
    """LOCKED → RUNNING for the members whose ``down_to`` state is RUNNING: all at once, at the very end."""

    name = "unlock"

    def __init__(self, gang: Gang, *, down_to: Callable[[GangMember], CudaState]) -> None:
        self._gang = gang
        self._down_to = down_to

    def describe(self) -> str:
        """What will run again."""
        return f"unlock {_names(self._gang)}"

    def run(self, interrupts: Interrupts) -> int:
        """Unlock all members that are locked."""
        self._gang.unlock(down_to=self._down_to)
        return 0

    def undo(self) -> None:
        """Every member back to where it was found."""
        self._gang.return_to_found()


def _maps_if_alive(pid: int) -> tuple[memory.Mapping, ...]:
    try:
        return memory.read_maps(pid)
    except (FileNotFoundError, ProcessLookupError):
        return ()  # that it ended is the gang's to say


def _names(gang: Gang) -> str:
    pids = [str(member.pid) for member in gang.members]
    if not pids:
        return "no process"
    return ("process " if len(pids) == 1 else "processes ") + ", ".join(pids)
