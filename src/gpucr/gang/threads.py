"""Holds all threads of CUDA processes but the driver's own while device memory is away and CRIU works.

CRIU wakes the threads that it dumps or restores from their system calls. Measured (H200, driver 580, JAX): a thread
woken inside libcuda continues and reads memory that is absent while the process is checkpointed, and the process
dies of SIGSEGV (in the second dump and restore of the same process, in five of five runs). Once a thread did so while
the driver checkpointed. With threads held as here, all of 34 cycles of dump and restore and 31 dumps with leave-running
succeeded (docs/adr/hardware.md).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Collection, Iterator, Mapping

from gpucr.errors import DeadlineExceeded, GpucrError, JobChanged, NotPermitted
from gpucr.linux import processes, tracing
from gpucr.linux.ptrace import HeldThreads
from gpucr.model import ProcessId

STOP_TIMEOUT_S = 10.0
"""How long to wait for a SIGSTOP."""


class GangThreads:
    """The threads of a gang's processes, held with ptrace or stopped with SIGSTOP.

    CRIU has to trace the processes itself, so it gets them stopped: a thread goes from held to stopped, and back,
    without running in between. The parent can see that stop with `waitpid(WUNTRACED)`.
    """

    def __init__(self, also_free: Callable[[int], Collection[int]] = lambda pid: ()) -> None:
        """``also_free``: threads that are never held, because they call the driver only on request."""
        self._also_free = also_free
        self._held: list[HeldThreads] = []
        self._free_threads: dict[int, int] = {}
        self._ids: dict[int, ProcessId] = {}
        self.are_stopped = False

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes whose threads are or were held."""
        return tuple(self._free_threads)

    def hold(self, free_threads: Mapping[int, int], deadline: float | None = None) -> None:
        """Running or stopped → only ``free_threads`` (pid → thread id) run. Adds to those already held.

        Raises DeadlineExceeded if a thread hangs in the kernel until the deadline (time.monotonic).
        """
        new = {pid: tid for pid, tid in free_threads.items() if pid not in self._free_threads}
        self._hold(new, deadline)
        self._free_threads |= new
        for pid in new:  # held, so the pid is still the same process
            if (stat := processes.read_stat(pid)) is not None:
                self._ids[pid] = ProcessId(pid, stat.start_time_ticks)

    def hold_again(self) -> None:
        """After `stop`, when CRIU is done: stopped → held, then the free threads continue.

        A process that cannot be held does not prevent holding the others or ending the stop: the driver does not answer
        for stopped processes. Its error is raised afterwards.
        """
        errors: list[GpucrError] = []
        for pid, tid in self._free_threads.items():
            try:
                self._hold({pid: tid})
            except GpucrError as error:
                errors.append(error)
        self.continue_stopped()
        if errors:
            raise errors[0]

    def stop(self) -> None:
        """Held → stopped by SIGSTOP, and no longer traced."""
        self.are_stopped = True
        for process in self._ids.values():
            processes.send_signal(process, signal.SIGSTOP)  # CRIU will notice one that has ended
        self.release()
        # CRIU must not see a half-finished stop: it would dump the signal as pending.
        processes.wait_for_stop(self.pids, STOP_TIMEOUT_S)

    def continue_stopped(self) -> None:
        """End the stop. Threads that are held do not notice."""
        self.are_stopped = False
        processes.continue_stopped(self._ids.values())

    def release(self) -> None:
        """Held → running (or stopped, if a stop is in effect)."""
        while self._held:
            self._held.pop().release()

    def _hold(self, free_threads: Mapping[int, int], deadline: float | None = None) -> None:
        held = HeldThreads(free_threads, deadline, self._also_free)
        with explained(*free_threads):
            held.hold()
        self._held.append(held)


@contextlib.contextmanager
def explained(*pids: int) -> Iterator[None]:
    """Turn ptrace's refusals in this block into errors that say what to do."""
    names = ", ".join(map(str, pids))
    try:
        yield
    except ProcessLookupError as e:
        raise JobChanged(f"process {names} ended", pids=pids, hint="its own log may say why") from e
    except TimeoutError as e:
        raise DeadlineExceeded(
            f"timed out before process {names} could be stopped: a thread hangs in the kernel",
            hint="`cat /proc/PID/task/*/stack` shows where; a network disk that does not answer is a usual reason",
        ) from e
    except OSError as e:
        raise NotPermitted(
            f"process {names} cannot be traced: {e.strerror or e}",
            pid=pids[0],
            hint="another tracer (debugger, strace, profiler) holds it, or ptrace is forbidden here"
            + (f": {limits}" if (limits := tracing.limits()) else ""),
            code="GPUCR-TRACED",
        ) from e
