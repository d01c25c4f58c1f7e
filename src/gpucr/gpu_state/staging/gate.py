"""Let the driver restore while its staging file is still being filled from storage.

The filled part is mapped, the rest stays a reservation. The restore thread copies in ascending order; at the edge it
gets SIGSEGV, which stops it for its tracer, gpucr. The tracer waits until more is filled, maps that, and continues the
thread without the signal: the access is repeated, now to mapped memory. Measured (driver 580, docs/adr/hardware.md):
all accesses to staging come from the restore thread in user mode, in ascending order but for the order within blocks of
about 1.4 MiB; a restore of 10.6 GiB took 1.54 s with 43 such stops and 1.51 s without.

Compared with userfaultfd: huge pages stay huge, no copy is made, every kernel has it, and if gpucr dies in the middle
the half-restored process dies of the signal, whereas a closed userfaultfd would supply zeros.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence

from gpucr.gpu_state.staging.attach import map_part
from gpucr.linux.descriptors import close_descriptor, send_descriptor
from gpucr.linux.ptrace import StopKind, TracedThread
from gpucr.model import StagedExtent

_AHEAD_BYTES = 64 << 20
"""Minimum to wait for at the edge: the driver's block may reach beyond the faulting byte, and stops are not free."""

_POLL_S = 0.02
_SIGSEGV_BIT = 1 << (signal.SIGSEGV - 1)

WaitForFilled = Callable[[int], int]
"""Waits until the file is filled up to this offset, and returns how far it is filled. May raise to give up."""


class Gate:
    """Maps a staging file into one process as it is being filled. `begin`, let the driver restore, `finish`.

    The process depends on gpucr: a failed filling kills it, since its driver waits for bytes that will never come.
    """

    def __init__(
        self, pid: int, restore_thread: int, fd: int, extents: Sequence[StagedExtent], wait_for_filled: WaitForFilled
    ) -> None:
        self.pid = pid
        self._restore_thread = restore_thread
        self._fd = fd
        self._extents = tuple(extents)
        self._wait_for_filled = wait_for_filled
        self._mapped = 0  # file offset below which all extents are mapped
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._end = threading.Event()
        self._tracer = threading.Thread(target=self._trace, name=f"gate-{pid}", daemon=True)

    def begin(self) -> None:
        """Returns when the first part is mapped and the driver may start. Raises errors of filling or tracing."""
        self._tracer.start()
        self._ready.wait()
        self._raise_error()

    def finish(self) -> None:
        """After the driver's call has returned: release the thread. Raises errors of filling or tracing."""
        self._end.set()
        self._tracer.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._tracer.join()
            raise self._error

    def _trace(self) -> None:
        thread = pidfd = None
        try:
            pidfd = os.pidfd_open(self.pid)
            thread = TracedThread.seize(self._restore_thread)
            number = send_descriptor(thread, self._fd)
            mask = thread.signal_mask()
            # A blocked SIGSEGV would make the kernel drop the program's own handler for it (force_sig_info).
            thread.set_signal_mask(mask & ~_SIGSEGV_BIT)
            try:
                self._map_up_to(thread, number, _AHEAD_BYTES)
                self._ready.set()
                self._serve(thread, number)
            finally:
                thread.set_signal_mask(mask)
            close_descriptor(thread, number)
        except BaseException as error:  # noqa: BLE001 - passed to begin or finish
            self._error = error
            if pidfd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            if pidfd is not None:
                os.close(pidfd)
            if thread is not None:
                with contextlib.suppress(OSError):
                    if self._error is None:
                        thread.detach()
                    else:
                        thread.let_go()  # the process has been killed
            self._ready.set()

    def _serve(self, thread: TracedThread, number: int) -> None:
        """Serve faults until all is mapped or the driver is done, stopped → stopped."""
        pass_on = 0
        while self._mapped < self._extents[-1].offset + self._extents[-1].size_bytes:
            thread.resume(pass_on)
            while (stop := thread.wait(_POLL_S)) is None:
                if self._end.is_set():
                    thread.stop()
                    return
            pass_on = stop.signal
            if stop.kind is StopKind.EXITED:
                raise ProcessLookupError(f"thread {self._restore_thread} ended")
            if stop.kind is StopKind.SIGNAL and stop.signal == signal.SIGSEGV:
                offset = self._offset_of(thread.signal_fault_address())
                if offset is not None:
                    self._map_up_to(thread, number, offset + _AHEAD_BYTES)
                    pass_on = 0
        if pass_on:
            thread.resume(pass_on)
            thread.stop()

    def _offset_of(self, address: int) -> int | None:
        """The file offset of an address that is not mapped yet; None for a fault with another cause."""
        for extent in self._extents:
            if extent.address <= address < extent.end:
                offset = extent.offset + address - extent.address
                return offset if offset >= self._mapped else None
        return None

    def _map_up_to(self, thread: TracedThread, number: int, offset: int) -> None:
        last = self._extents[-1]
        filled = self._wait_for_filled(min(offset, last.offset + last.size_bytes))
        for extent in self._extents:
            begin = max(extent.offset, self._mapped)
            end = min(extent.offset + extent.size_bytes, filled)
            if begin < end:
                map_part(thread, number, StagedExtent(extent.address + begin - extent.offset, end - begin, begin))
        self._mapped = max(self._mapped, filled)
