"""Hold the threads of other processes with ptrace(2), by one OS thread that traces them all."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping

from gpucr.linux import processes
from gpucr.linux.interrupted_calls import with_call_number
from gpucr.linux.ptrace import TracedThread

_MACHINE = os.uname().machine


class HeldThreads:
    """Holds all but one thread of each process. Running or stopped (SIGSTOP) → held → as before.

    ``free_threads`` maps each pid to the thread id that keeps running; ``also_free`` names more in a process. Needs the
    right to trace the processes (same user and dumpable, or CAP_SYS_PTRACE; Yama's ptrace_scope below 2). A SIGSTOP
    stays in effect for the free threads until somebody sends SIGCONT, which the held ones do not notice. ``deadline``
    (time.monotonic): how long to wait for a thread that hangs in the kernel and cannot be stopped.
    """

    def __init__(
        self,
        free_threads: Mapping[int, int],
        deadline: float | None = None,
        also_free: Callable[[int], Collection[int]] = lambda pid: (),
    ) -> None:
        self._free_threads = dict(free_threads)
        self._also_free = also_free
        self._deadline = deadline
        self._held: list[TracedThread] = []
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], queue.SimpleQueue[BaseException | None]] | None]
        self._calls = queue.SimpleQueue()
        self._tracer: threading.Thread | None = None

    def hold(self) -> None:
        """Stop the threads. Returns when all have stopped.

        Raises OSError if tracing is refused, TimeoutError if the deadline passes first.
        """
        self._tracer = threading.Thread(target=self._serve, name="ptrace", daemon=True)
        self._tracer.start()
        try:
            self._call(self._seize_all)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release all held threads. Does nothing if none is held; threads that have ended are skipped."""
        if self._tracer is None:
            return
        self._call(self._detach_all)
        self._calls.put(None)
        self._tracer.join()
        self._tracer = None

    def _serve(self) -> None:
        while (request := self._calls.get()) is not None:
            call, answer = request
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - carried to the thread that asked
                answer.put(error)
            else:
                answer.put(None)

    def _call(self, call: Callable[[], None]) -> None:
        answer: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._calls.put((call, answer))
        error = answer.get()
        if error is not None:
            raise error

    def _seize_all(self) -> None:
        for pid, free_thread in self._free_threads.items():
            seen = {free_thread, *self._also_free(pid)}
            # A thread that is not held yet can start another one: repeat until there is no new one.
            while new := [tid for tid in processes.threads(pid) if tid not in seen]:
                seen.update(new)
                for tid in new:
                    self._seize(tid)

    def _seize(self, tid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended
            try:
                thread = TracedThread.seize(tid, seconds_left(self._deadline))
            except PermissionError:
                # Also the kernel's answer for an ending thread or a zombie, which a main thread can be for long.
                stat = processes.read_stat(tid)
                if stat is None or stat.status in "ZX":
                    return
                raise
            self._held.append(thread)
            if _MACHINE == "x86_64":  # other machines have another call for registers; hold it anyway
                thread.set_registers(with_call_number(thread.registers(), thread.read_memory).with_full_timeout())

    def _detach_all(self) -> None:
        for thread in self._held:
            thread.let_go(thread.last_stop.signal)
        self._held.clear()


def seconds_left(deadline: float | None) -> float | None:
    """A time.monotonic() value; None: no limit."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)
