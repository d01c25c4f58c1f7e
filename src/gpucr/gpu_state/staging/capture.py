"""Watch the restore thread during a checkpoint and give it better staging than it requests.

The driver asks with one ``mmap`` of private anonymous memory, MAP_POPULATE set: 4 KiB pages, made by one thread, more
than half of the checkpoint's time. A capture stops the thread where it enters that call (ptrace) and

- with a staging file: turns the call into a shared mapping of the file, by changing its arguments. The file's huge
  pages can exist before the job is even locked, and its content can be read, taken out of the process and put back
  without a copy.
- without one (only root can make a file of huge pages): drops MAP_POPULATE, and at the end of the call advises huge
  pages and faults them in with many threads.

Otherwise the driver works as if unwatched, even if gpucr dies: arguments are changed atomically, and injected calls are
crash-safe (linux/injection.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, PAGESIZE

from gpucr.gpu_state.staging.attach import close_left, keep_from_children
from gpucr.gpu_state.staging.extents import filled_bytes
from gpucr.linux import memory, tracing
from gpucr.linux.descriptors import close_descriptor, send_descriptor
from gpucr.linux.injection import MADVISE, MAP_FIXED, MMAP, run_syscall
from gpucr.linux.memory import HUGE_PAGE_BYTES
from gpucr.linux.ptrace import StopKind, TracedThread, seconds_left
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import StagedExtent

_MAP_POPULATE = 0x8000  # include/uapi/asm-generic/mman.h
_STAGING_FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | _MAP_POPULATE
_SMALLEST_BYTES = 1 << 20
_SYSCALL_INSTRUCTION_BYTES, _NO_CALL = 2, (1 << 64) - 1
_POLL_S = 0.02
_EXPECTED_PER_STAGED = 1.05  # measured (H200, driver 580): NVML's figure and staging differ by 1 %
_U32 = 0xFFFFFFFF


class Capture:
    """Watches one process's checkpoint. `begin`, let the driver checkpoint, `finish`.

    ``file`` is the staging file, or None for private memory. ``reason`` says, after `begin` or `finish`, why nothing
    was captured; the driver then works in its plain way. This never raises: a slower checkpoint is better than none.
    ``expected_bytes`` is the process's device memory (0: unknown): once the driver has asked for about that much, its
    other system calls are no longer intercepted. ``deadline`` (time.monotonic): how long to wait for a thread that
    hangs in the kernel.
    """

    def __init__(
        self,
        pid: int,
        restore_thread: int,
        file: StagingFile | None,
        *,
        expected_bytes: int = 0,
        deadline: float | None = None,
    ) -> None:
        self.pid = pid
        self.file = file
        self._expected_bytes = expected_bytes
        self._deadline = deadline
        self.reason: str | None = None
        self._restore_thread = restore_thread
        self._extents: list[StagedExtent] = []
        self._ready = threading.Event()
        self._end = threading.Event()
        self._tracer = threading.Thread(target=self._trace, name=f"capture-{pid}", daemon=True)

    @property
    def extents(self) -> tuple[StagedExtent, ...]:
        """The parts of the file that the driver uses, in order (private memory: addresses, with offset 0)."""
        return tuple(self._extents)

    def begin(self) -> None:
        """Start to watch; `wait_started` before the driver's call."""
        if self.file is None and not memory.private_huge_pages():
            # Small pages faulted one by one cost more than those that the driver populates at once (5.3 s, 5.1 s).
            self.reason = "transparent huge pages are off"
            self._ready.set()
            return
        self._tracer.start()

    def wait_started(self) -> None:
        """Returns when the thread is watched, or known to be unwatchable."""
        self._ready.wait()

    def finish(self) -> None:
        """Stop watching, after the driver's call has returned. The thread continues."""
        self._end.set()
        if self._tracer.ident is not None:
            self._tracer.join()
        if self.reason is None and not self._extents:
            self.reason = "the driver asked for no staging that is known"

    def filled_bytes(self) -> int:
        """How much of the file is filled so far (see `extents.filled_bytes`). 0 for private memory: unknown."""
        extents = self.extents
        return filled_bytes(self.pid, extents) if extents and self.file is not None else 0

    def _trace(self) -> None:
        thread = None
        try:
            thread = TracedThread.seize(self._restore_thread, seconds_left(self._deadline))
            close_left(thread)
            given = (self.file, send_descriptor(thread, self.file.fd)) if self.file is not None else None
            self._ready.set()
            self._watch(thread, given)
            if given is not None:
                close_descriptor(thread, given[1])
        except ProcessLookupError:
            self.reason = "the process has ended"
        except OSError as error:  # also InjectionUnavailable, whose text is the reason
            self.reason = error.strerror or str(error)
            if isinstance(error, PermissionError) and (limits := tracing.limits()):
                self.reason += f": {limits}"
        finally:
            if thread is not None:
                with contextlib.suppress(OSError):
                    thread.detach(thread.last_stop.signal)  # the signal that it was about to take
            self._ready.set()

    def _watch(self, thread: TracedThread, given: tuple[StagingFile, int] | None) -> None:
        """Follow the thread's system calls until the end, stopped → stopped.

        ``given``: the staging file, and the number of its descriptor in the thread's process.
        """
        signal = 0
        while not self._end.is_set():
            if self._has_all():
                thread.resume(signal)
            else:
                thread.resume_to_syscall(signal)
            while (stop := thread.wait(_POLL_S)) is None:
                if self._end.is_set():
                    thread.stop()
                    return
            signal = stop.signal
            if stop.kind is StopKind.SYSCALL_ENTRY and self.reason is None and self._is_staging(thread):
                self._redirect(thread, *given) if given is not None else self._improve(thread)
            elif stop.kind is StopKind.EXITED:
                raise ProcessLookupError(f"thread {self._restore_thread} ended")
        thread.resume(signal)  # leave the call's entry, where no call can be injected
        thread.stop()

    def _has_all(self) -> bool:
        """Whether the driver has asked for all of the device memory, if its size is known."""
        asked = sum(extent.size_bytes for extent in self._extents)
        return 0 < self._expected_bytes <= asked * _EXPECTED_PER_STAGED

    @staticmethod
    def _is_staging(thread: TracedThread) -> bool:
        at = thread.registers()
        return (
            at.orig_rax == MMAP
            and at.rsi >= _SMALLEST_BYTES
            and at.r10 & _STAGING_FLAGS == _STAGING_FLAGS
            and not at.r10 & MAP_FIXED
            and at.r8 & _U32 == _U32
        )

    def _redirect(self, thread: TracedThread, file: StagingFile, number: int) -> None:
        """Anonymous → the next part of the file. The file grows first: access beyond its end raises SIGBUS."""
        asked = thread.registers()
        offset = _rounded_up(self._extents[-1].offset + self._extents[-1].size_bytes if self._extents else 0)
        size_bytes = _rounded_up(asked.rsi, PAGESIZE)
        file.resize(max(file.size_bytes, offset + size_bytes))
        changed = asked.copy()
        changed.r10, changed.r8, changed.r9 = MAP_SHARED, number, offset
        thread.set_registers(changed)
        result = self._to_exit(thread)
        back = thread.registers()
        back.r10, back.r8, back.r9 = asked.r10, asked.r8, asked.r9
        if result < 0:  # let it ask again, in its own way, from now on unwatched
            back.rip, back.rax, back.orig_rax = back.rip - _SYSCALL_INSTRUCTION_BYTES, MMAP, _NO_CALL
            self.reason = f"the staging file cannot be mapped (errno {-result})"
        else:
            self._extents.append(StagedExtent(result, size_bytes, offset))
        thread.set_registers(back)
        if result >= 0:
            keep_from_children(thread, result, size_bytes)

    def _improve(self, thread: TracedThread) -> None:
        """4 KiB pages made by one thread → huge pages made by many."""
        asked = thread.registers()
        changed = asked.copy()
        changed.r10 = asked.r10 & ~_MAP_POPULATE
        thread.set_registers(changed)
        address = self._to_exit(thread)
        back = thread.registers()
        back.r10 = asked.r10
        thread.set_registers(back)
        if address < 0:
            return  # the driver handles it: it would have got the same
        size_bytes = _rounded_up(asked.rsi, PAGESIZE)
        run_syscall(thread, MADVISE, address, size_bytes, MADV_HUGEPAGE)
        keep_from_children(thread, address, size_bytes)
        memory.fault_in(self.pid, address, size_bytes, threads=len(os.sched_getaffinity(0)))
        self._extents.append(StagedExtent(address, size_bytes, 0))

    def _to_exit(self, thread: TracedThread) -> int:
        """Let the call run. Returns its result, with the thread stopped at the call's exit."""
        thread.resume_to_syscall()
        while (stop := thread.wait()) is None or stop.kind is not StopKind.SYSCALL_EXIT:
            if stop is not None and stop.kind is StopKind.EXITED:
                raise ProcessLookupError(f"thread {self._restore_thread} ended")
            thread.resume_to_syscall(stop.signal if stop is not None else 0)
        result = thread.registers().rax
        return result - (1 << 64) if result >> 63 else result


def _rounded_up(size_bytes: int, grain_bytes: int = HUGE_PAGE_BYTES) -> int:
    return -(-size_bytes // grain_bytes) * grain_bytes
