"""Stop single threads of another process with ptrace(2), and let them go again.

A tracer is an operating system thread, not a process, so every `HeldThreads` has one of its own that makes all the
calls. When gpucr dies, the kernel detaches and the threads go on.

A thread that is held in poll(), nanosleep() or a futex wait with a timeout begins the call anew when it goes on, with
its whole timeout. Left alone, the kernel would let it wait for the rest; but that is a state which CRIU cannot dump:
CRIU 4.2.1 makes the call fail with EINTR instead ("Will restore N with interrupted system call").
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
from collections.abc import Callable, Mapping

from gpucr.linux import processes

_SEIZE, _INTERRUPT, _DETACH, _EVENT_STOP = 0x4206, 0x4207, 17, 128  # include/uapi/linux/ptrace.h
_GETREGS, _SETREGS = 12, 13  # arch/x86/include/uapi/asm/ptrace-abi.h
_REGISTERS, _RAX, _ORIG_RAX = 27, 10, 15  # struct user_regs_struct of x86-64: 64 bits each
_ERESTARTNOHAND, _ERESTART_RESTARTBLOCK = 514, 516  # include/linux/errno.h
_WALL = 0x40000000  # include/uapi/linux/wait.h: also threads, which are no children of the caller

_MACHINE = os.uname().machine

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


class HeldThreads:
    """All threads of some processes but one each, stopped. Running or stopped (SIGSTOP) → held → as before.

    ``free_threads`` maps each pid to the thread id that goes on. Needs the right to trace the processes (same user and
    dumpable, or CAP_SYS_PTRACE; Yama's ptrace_scope below 2). A stop by SIGSTOP stays in force for the free threads
    until somebody sends SIGCONT, which the held ones do not notice.
    """

    def __init__(self, free_threads: Mapping[int, int]) -> None:
        self._free_threads = dict(free_threads)
        self._held: dict[int, int] = {}  # thread id → the signal that it was about to take, or 0
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], queue.SimpleQueue[BaseException | None]] | None]
        self._calls = queue.SimpleQueue()
        self._tracer: threading.Thread | None = None

    def hold(self) -> None:
        """Stop the threads. Returns when all of them stand still. Raises OSError where tracing is refused."""
        self._tracer = threading.Thread(target=self._serve, name="ptrace", daemon=True)
        self._tracer.start()
        try:
            self._call(self._seize_all)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let all held threads go on. Does nothing where none is held; threads that have ended are passed over."""
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
            seen = {free_thread}
            # A thread that is not held yet can start another one: look again until there is none that is new.
            while new := [tid for tid in processes.threads(pid) if tid not in seen]:
                seen.update(new)
                for tid in new:
                    self._seize(tid)

    def _seize(self, tid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended
            try:
                _ptrace(_SEIZE, tid)
            except PermissionError:
                # The kernel's answer for a thread that is ending or a zombie, too, as a main thread can be for long.
                stat = processes.read_stat(tid)
                if stat is None or stat.status in "ZX":
                    return
                raise
            self._held[tid] = 0
            _ptrace(_INTERRUPT, tid)
            # __WALL waits for this very thread; its end is reported as well, and then there is nothing to hold.
            _, status = os.waitpid(tid, _WALL)
            if not os.WIFSTOPPED(status):
                del self._held[tid]
                return
            if status >> 16 != _EVENT_STOP:
                self._held[tid] = os.WSTOPSIG(status)
            _begin_call_anew(tid)

    def _detach_all(self) -> None:
        for tid, pending_signal in self._held.items():
            with contextlib.suppress(ProcessLookupError):
                _ptrace(_DETACH, tid, pending_signal)
        self._held.clear()


def _begin_call_anew(tid: int) -> None:
    """Where the interrupted call would wait for the rest of its timeout, let it be called again (stopped → stopped)."""
    if _MACHINE != "x86_64":  # the registers are told in another way there; the threads are held all the same
        return
    registers = (ctypes.c_int64 * _REGISTERS)()
    _ptrace(_GETREGS, tid, ctypes.addressof(registers))
    if registers[_ORIG_RAX] >= 0 and registers[_RAX] == -_ERESTART_RESTARTBLOCK:
        registers[_RAX] = -_ERESTARTNOHAND
        _ptrace(_SETREGS, tid, ctypes.addressof(registers))


def _ptrace(request: int, tid: int, data: int = 0) -> None:
    if _libc.ptrace(request, tid, None, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace of thread {tid}: {os.strerror(number)}")
