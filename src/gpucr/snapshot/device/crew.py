"""Threads that take pieces of work until they are told to stop or one of them fails."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from gpucr.linux import libc

THREADS = max(8, min(12, len(os.sched_getaffinity(0)) * 3 // 4))
"""Three quarters of the processors, so that CRIU and what drives it have one: with more threads than that, the main
thread waits for the interpreter's lock (H100 machine, 16 processors, a restore of 8 GiB from memory: 1.2 s with 12
threads, 1.6 to 1.9 s with 16 to 32).
"""

_MAX_BUFFERS_BYTES = 512 << 20


def buffers_bytes(piece_bytes: int) -> int:
    """Maximum memory for one crew's buffers, each the size of a piece."""
    return min(THREADS * piece_bytes, _MAX_BUFFERS_BYTES)


Job = TypeVar("Job")


class PieceBuffer:
    """Private page-aligned memory for one piece, as O_DIRECT needs. Every thread has its own."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # open(2): O_DIRECT into private memory is not safe while the process forks, as it does to start CRIU.
        self._memory.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def part(self, start: int, end: int) -> memoryview:
        """The bytes from ``start`` to ``end``."""
        return self._view[start:end]

    def is_zero(self, length: int) -> bool:
        """Whether the first ``length`` bytes (at least one) are all zero."""
        # Compare the buffer with itself shifted by one byte: memcmp stops at the first difference, and runs without the
        # GIL.
        return self._view[0] == 0 and libc.memcmp(self._address, self._address + 1, length - 1) == 0


class Crew(Generic[Job]):
    """Daemon threads that call ``work`` for items from ``take``, each with its own buffer.

    ``take(thread)`` is called with `lock` held, and returns None if there is nothing to do now. An exception in
    ``work`` ends all threads and is raised by `check` and `wait_until`. ``close`` is called once, by the last thread.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        *,
        take: Callable[[int], Job | None],
        work: Callable[[Job, PieceBuffer], None],
        close: Callable[[], None],
    ) -> None:
        self.lock = threading.Lock()
        self._work_to_do = threading.Condition(self.lock)
        self._work_done = threading.Condition(self.lock)
        self._name = name
        self._count = threads
        self._take = take
        self._work = work
        self._close = close
        self._threads: list[threading.Thread] = []
        self._local = threading.local()  # `is_one` in the crew's threads: one may work before it is in `_threads`
        self._running = 0
        self._closed = False
        self._error: BaseException | None = None
        self.has_ended = False

    def start(self, buffer_bytes: int) -> None:
        """Start the threads; fewer if their buffers would take more than 512 MiB. Raises RuntimeError."""
        count = max(1, min(self._count, _MAX_BUFFERS_BYTES // buffer_bytes))
        for number in range(count):
            thread = threading.Thread(
                target=self._run, args=(number, buffer_bytes), name=f"{self._name}-{number}", daemon=True
            )
            with self.lock:
                self._running += 1
            try:
                thread.start()
            except RuntimeError:
                with self.lock:
                    self._running -= 1
                raise
            self._threads.append(thread)

    def offer(self) -> None:
        """Signal new work. Call it with `lock` held."""
        self._work_to_do.notify_all()

    def announce(self) -> None:
        """Signal progress to waiters. Call it with `lock` held."""
        self._work_done.notify_all()

    def end(self) -> None:
        """Let the threads end after their current piece. Call it with `lock` held."""
        self.has_ended = True
        self._work_to_do.notify_all()
        self._work_done.notify_all()

    def stop(self) -> None:
        """Let the threads end after their current piece, and wait for them. Idempotent.

        Called from one of the threads, it does not wait: another one may be doing the same.
        """
        with self.lock:
            self.end()
        if getattr(self._local, "is_one", False):
            return
        for thread in self._threads:
            thread.join()
        if not self._threads:
            self._close_once()

    def check(self) -> None:
        """Raise the first error of a thread."""
        if self._error is not None:
            raise self._error

    def wait_until(self, reached: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait for ``reached`` (called with `lock` held). False: out of time, or the crew ended first.

        Raises the first error of a thread.
        """
        with self.lock:
            self._work_done.wait_for(lambda: self._error is not None or self.has_ended or reached(), timeout_s)
            self.check()
            return reached()

    def _run(self, number: int, buffer_bytes: int) -> None:
        self._local.is_one = True
        try:
            self._serve(number, PieceBuffer(buffer_bytes))
        except BaseException as e:  # noqa: BLE001 - any error must reach the waiter
            with self.lock:
                self._error = self._error or e
                self.end()
        finally:
            with self.lock:
                self._running -= 1
                is_last = self._running == 0 and self.has_ended
            if is_last:
                self._close_once()

    def _serve(self, number: int, buffer: PieceBuffer) -> None:
        while True:
            with self.lock:
                job = self._take(number)
                while job is None and not self.has_ended:
                    self._work_to_do.wait()
                    job = self._take(number)
                if self.has_ended or job is None:
                    return
            self._work(job, buffer)

    def _close_once(self) -> None:
        with self.lock:
            if self._closed:
                return
            self._closed = True
        self._close()
