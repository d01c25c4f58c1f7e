"""Stop single threads of another process with ptrace(2), watch and release them.

A tracer is an operating system thread, not a process: all calls for a traced thread come from the thread that seized
it. When gpucr dies, the kernel detaches and the threads continue. A signal that a thread was about to take is not lost
then: stops are read with WNOWAIT, because collecting a stop clears what the kernel would otherwise deliver on detach
(Linux 6.18, `wait_task_stopped` and `ptrace_signal`; a test shows it).

A thread held in poll(), nanosleep() or a futex wait with a timeout restarts the call, with its whole timeout, when it
continues. By itself the kernel would let it wait for the rest, but CRIU cannot dump that state: CRIU 4.2.1 makes the
call fail with EINTR instead ("Will restore N with interrupted system call").
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import os
import queue
import signal as signals
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import overload

from msgspec import Struct

from gpucr.errors import ProcessNotFound
from gpucr.linux import libc, proc_text, processes
from gpucr.linux.interrupted_calls import with_call_number
from gpucr.linux.registers import Registers

# include/uapi/linux/ptrace.h and, for the registers, arch/x86/include/uapi/asm/ptrace-abi.h
_CONT, _GETREGS, _SETREGS, _DETACH, _SYSCALL = 7, 12, 13, 17, 24
_SETOPTIONS, _GETSIGINFO, _GETREGSET, _SEIZE, _INTERRUPT = 0x4200, 0x4202, 0x4204, 0x4206, 0x4207
_GETSIGMASK, _SETSIGMASK, _GET_SYSCALL_INFO, _GET_RSEQ_CONFIGURATION = 0x420A, 0x420B, 0x420E, 0x420F
_O_TRACESYSGOOD, _O_SUSPEND_SECCOMP = 1, 1 << 21
# Distinguishes system call stops from SIGTRAP stops; without it, the kernel sends that signal when gpucr dies in one.
_OPTIONS = _O_TRACESYSGOOD
_EVENT_STOP, _SYSCALL_STOP = 128, signals.SIGTRAP | 0x80
_INFO_ENTRY, _INFO_BYTES = 1, 88  # struct ptrace_syscall_info
_WALL = 0x40000000  # include/uapi/linux/wait.h: also threads that are not the caller's children
_SIGINFO_BYTES, _SI_KERNEL = 128, 0x80  # include/uapi/asm-generic/siginfo.h

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
_MACHINE = os.uname().machine

_ptrace_of_libc = libc.function(
    "ptrace", ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, result=ctypes.c_long
)


class StopKind(enum.Enum):
    """Why a traced thread is stopped (ptrace(2), "Stopped states")."""

    SYSCALL_ENTRY = "entering a system call"
    SYSCALL_EXIT = "leaving a system call"
    SIGNAL = "about to take a signal"
    GROUP_STOP = "its process is stopped (SIGSTOP)"
    INTERRUPTED = "interrupted"
    EXITED = "it has ended"


class Stop(Struct, frozen=True):
    """What happened to a traced thread.

    ``signal`` is lost unless it is passed to the call that continues the thread.
    """

    kind: StopKind
    signal: int = 0


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class TracedThread:
    """One thread of another process under ptrace. All calls must come from the OS thread that called `seize`.

    Each method but `stop`, `wait`, `status` and the two for memory needs the thread stopped. They raise
    ProcessLookupError if the thread has ended or runs, or when called from another OS thread.
    """

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self.last_stop = Stop(StopKind.INTERRUPTED)

    @classmethod
    def seize(cls, tid: int, timeout_s: float | None = None) -> TracedThread:
        """Running, blocked or stopped → traced and stopped.

        Needs the right to trace the process (same user and dumpable, or CAP_SYS_PTRACE; Yama's ptrace_scope below 2).
        Raises PermissionError if that is refused, also for a zombie, and ProcessLookupError if there is no such thread
        or it ends meanwhile. If the thread is not stopped after ``timeout_s`` (it is blocked in the kernel and cannot
        be interrupted), raises TimeoutError; it stays traced until the calling OS thread ends, which it must do.
        """
        thread = cls(tid)
        _ptrace(_SEIZE, tid, data=_OPTIONS)
        try:
            if thread.stop(timeout_s).kind is StopKind.EXITED:
                raise ProcessLookupError(f"thread {tid} ended")
        except TimeoutError:
            raise
        except BaseException:
            thread.detach()
            raise
        return thread

    def stop(self, timeout_s: float | None = None) -> Stop:
        """Running → stopped, never at a call's entry. Raises TimeoutError if it still runs after ``timeout_s``.

        Another stop may come first and is returned; an INTERRUPTED one then follows when the thread continues.
        """
        _ptrace(_INTERRUPT, self.tid)
        while (found := self._wait(timeout_s)).kind is StopKind.SYSCALL_ENTRY:
            self.resume()  # does not block, since the interruption is pending
        return found

    def _wait(self, timeout_s: float | None) -> Stop:
        found = self.wait() if timeout_s is None else self.wait(timeout_s)
        if found is None:
            raise TimeoutError(errno.ETIMEDOUT, f"thread {self.tid} did not stop within {timeout_s:g} s")
        return found

    def resume(self, signal: int = 0) -> None:
        """Stopped → running; delivers ``signal`` if the stop was for one."""
        _ptrace(_CONT, self.tid, data=signal)

    def resume_to_syscall(self, signal: int = 0) -> None:
        """Stopped → running, until it enters or leaves a system call."""
        _ptrace(_SYSCALL, self.tid, data=signal)

    def interrupt(self) -> Stop:
        """Stopped at a call's exit or by an interruption → interrupted, before the program runs an instruction."""
        _ptrace(_INTERRUPT, self.tid)
        self.resume()
        return self.wait()

    def detach(self, signal: int = 0) -> None:
        """Stopped or running → running (or stopped by SIGSTOP), no longer traced. Does nothing if it has ended."""
        try:
            _ptrace(_DETACH, self.tid, data=signal)
        except ProcessLookupError:
            # It runs or has ended; a dead thread must be reaped, or nobody can reap its process.
            with contextlib.suppress(ProcessLookupError):
                if self.stop().kind is not StopKind.EXITED:
                    _ptrace(_DETACH, self.tid, data=self.last_stop.signal)

    def let_go(self, signal: int = 0) -> None:
        """Like `detach`, as a tracing thread's last act. Does not wait for a thread that is ending.

        The first process of a pid namespace ends only when all others in it have been reaped, and traced ones can be
        reaped only when their tracer detaches or ends. Two tracers waiting for each other would wait forever.
        """
        with contextlib.suppress(ProcessLookupError):
            _ptrace(_DETACH, self.tid, data=signal)

    @overload
    def wait(self) -> Stop: ...

    @overload
    def wait(self, timeout_s: float) -> Stop | None: ...

    def wait(self, timeout_s: float | None = None) -> Stop | None:
        """Running → stopped (or ended). None if it still runs after ``timeout_s``."""
        start = time.monotonic()
        while (found := self._look()) is None:
            waited_s = time.monotonic() - start
            if timeout_s is not None and waited_s >= timeout_s:
                return None
            # The kernel has no wait with a timeout; proportional pauses cost little, whether stops are rare or
            # frequent.
            time.sleep(min(max(waited_s / 8, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
        self.last_stop = found
        return found

    def _look(self) -> Stop | None:
        try:
            seen = self._seen()
            if seen is None:
                stat = processes.read_stat(self.tid)
                if stat is not None and stat.status not in "ZX":
                    return None
                seen = self._seen()  # it may have ended since
        except ChildProcessError:
            return Stop(StopKind.EXITED)
        if seen is None:  # a main thread's end is reported after all others', and we may hold those
            return Stop(StopKind.EXITED)
        if seen.si_code != os.CLD_TRAPPED:
            self._collect()
            return Stop(StopKind.EXITED)
        event, signal = seen.si_status >> 8, seen.si_status & 0xFF
        if event == _EVENT_STOP:
            return Stop(StopKind.INTERRUPTED if signal == signals.SIGTRAP else StopKind.GROUP_STOP)
        if signal == _SYSCALL_STOP:
            return Stop(self._syscall_stop())
        return Stop(StopKind.SIGNAL, signal)

    def _seen(self) -> os.waitid_result | None:
        return os.waitid(os.P_PID, self.tid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL)

    def _collect(self) -> None:
        """Reap a zombie as its tracer. Our own child stays for whoever waits for it."""
        stat = processes.read_stat(self.tid)
        is_our_child = stat is not None and stat.parent_pid == os.getpid() and _is_process(self.tid)
        if not is_our_child:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.tid, os.WEXITED | os.WNOHANG | _WALL)

    def _syscall_stop(self) -> StopKind:
        info = ctypes.create_string_buffer(_INFO_BYTES)
        try:
            _ptrace(_GET_SYSCALL_INFO, self.tid, len(info), ctypes.addressof(info))
        except ProcessLookupError:
            return StopKind.EXITED
        return StopKind.SYSCALL_ENTRY if info.raw[0] == _INFO_ENTRY else StopKind.SYSCALL_EXIT

    def registers(self) -> Registers:
        """The general registers. x86-64 only."""
        found = Registers()
        _ptrace(_GETREGS, self.tid, data=ctypes.addressof(found))
        return found

    def set_registers(self, registers: Registers) -> None:
        """Set the general registers, all at once."""
        _ptrace(_SETREGS, self.tid, data=ctypes.addressof(registers))

    def register_set(self, kind: int, size_bytes: int) -> bytes:
        """Another register set (PTRACE_GETREGSET, NT_… of elf.h), of at most ``size_bytes``."""
        content = ctypes.create_string_buffer(size_bytes)
        vector = _Vector(ctypes.addressof(content), size_bytes)
        _ptrace(_GETREGSET, self.tid, kind, ctypes.addressof(vector))
        return content.raw[: vector.size]

    def signal_fault_address(self) -> int:
        """At a stop for SIGSEGV or SIGBUS: the address whose access caused it (``si_addr``)."""
        return int.from_bytes(self._signal_info()[16:24], "little")

    def is_stopped_by_fault(self) -> bool:
        """Whether the stop is for a failed memory access, which is repeated if the signal is dropped."""
        if self.last_stop.signal not in (signals.SIGSEGV, signals.SIGBUS):
            return False
        # the kernel's own codes; SI_KERNEL means other errors, negative codes a signal sent by a process
        return 0 < int.from_bytes(self._signal_info()[8:12], "little", signed=True) < _SI_KERNEL

    def _signal_info(self) -> bytes:
        info = ctypes.create_string_buffer(_SIGINFO_BYTES)
        _ptrace(_GETSIGINFO, self.tid, data=ctypes.addressof(info))
        return info.raw

    def signal_mask(self) -> int:
        """The blocked signals, bit N - 1 for signal N. In sigsuspend() and the like: the mask after the call."""
        mask = ctypes.c_uint64()
        _ptrace(_GETSIGMASK, self.tid, ctypes.sizeof(mask), ctypes.addressof(mask))
        return mask.value

    def set_signal_mask(self, mask: int) -> None:
        """Set the blocked signals. SIGKILL and SIGSTOP stay unblocked."""
        value = ctypes.c_uint64(mask)
        _ptrace(_SETSIGMASK, self.tid, ctypes.sizeof(value), ctypes.addressof(value))

    def suspend_seccomp(self) -> None:
        """Suspend the thread's seccomp filter until `resume_seccomp` or the end of the tracing.

        Raises PermissionError without CAP_SYS_ADMIN, or if the caller has such a filter itself.
        """
        _ptrace(_SETOPTIONS, self.tid, data=_OPTIONS | _O_SUSPEND_SECCOMP)

    def resume_seccomp(self) -> None:
        """Put the thread's seccomp filter back into effect."""
        _ptrace(_SETOPTIONS, self.tid, data=_OPTIONS)

    def rseq_address(self) -> int:
        """Where the thread's struct rseq (rseq(2)) lies; 0 for none, and before Linux 5.13, which cannot tell."""
        found = (ctypes.c_uint64 * 3)()  # struct ptrace_rseq_configuration: the address comes first
        try:
            _ptrace(_GET_RSEQ_CONFIGURATION, self.tid, ctypes.sizeof(found), ctypes.addressof(found))
        except OSError as e:
            if e.errno != errno.EIO:
                raise
        return found[0]

    def status(self) -> dict[str, str]:
        """``/proc/TID/status`` (proc_pid_status(5))."""
        with self._open("status", os.O_RDONLY) as fd, open(fd, "rb", closefd=False) as file:
            return proc_text.in_status(file.read())

    def drop_signal(self) -> None:
        """Drop this stop's signal, even if gpucr dies now."""
        os.waitid(os.P_PID, self.tid, os.WSTOPPED | os.WNOHANG | _WALL)
        self.last_stop = Stop(self.last_stop.kind)

    def read_memory(self, address: int, size_bytes: int) -> bytes:
        """Bytes of the process's memory. Raises OSError (EFAULT) if part of the range cannot be read."""
        with self._open("mem", os.O_RDONLY) as fd, self._addressing(address):
            found = os.pread(fd, size_bytes, address)
            if not found:
                raise ProcessLookupError(errno.ESRCH, f"thread {self.tid} ended")  # its memory is gone
            if len(found) < size_bytes:
                raise OSError(errno.EIO, "only a part of it is there")
        return found

    def write_memory(self, address: int, content: bytes) -> None:
        """Change the process's memory. Raises OSError (EFAULT) if part of the range is not mapped."""
        with self._open("mem", os.O_RDWR) as fd, self._addressing(address):
            written_bytes = os.pwrite(fd, content, address)
            if not written_bytes:
                raise ProcessLookupError(errno.ESRCH, f"thread {self.tid} ended")
            if written_bytes < len(content):
                raise OSError(errno.EIO, "only a part of it is there")

    @contextlib.contextmanager
    def _addressing(self, address: int) -> Iterator[None]:
        try:
            yield
        except ProcessLookupError:
            raise
        except OSError as e:
            raise OSError(errno.EFAULT, f"memory of thread {self.tid} at {address:#x}: {e.strerror}") from e
        except OverflowError as e:  # a register can hold anything
            raise OSError(errno.EFAULT, f"memory of thread {self.tid} at {address:#x}: no address") from e

    @contextlib.contextmanager
    def _open(self, name: str, flags: int) -> Iterator[int]:
        try:
            fd = os.open(processes.PROC / str(self.tid) / name, flags | os.O_CLOEXEC)
        except FileNotFoundError as e:
            raise ProcessLookupError(errno.ESRCH, f"thread {self.tid} ended") from e
        try:
            yield fd
        finally:
            os.close(fd)


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


def _is_process(tid: int) -> bool:
    try:
        return processes.thread_group_leader(tid) == tid
    except ProcessNotFound:
        return False


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> None:
    libc.check(_ptrace_of_libc(request, tid, address, data), f"ptrace of thread {tid}")
