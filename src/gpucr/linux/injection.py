"""Run a system call in a thread of another process, so that the thread continues as before even if gpucr dies.

The usual way (set the registers, let the thread make the call, restore them) wrecks the thread if the tracer is killed
in between. Here the thread holds all that it needs to return before it runs:

1. Below its stack, where the next signal handler's frame would be, gpucr writes a frame with all its registers, its
   floating point and vector state and its signal mask, as if a handler were running (sigframe.py).
2. One PTRACE_SETREGS, which is atomic, sends it to a ``syscall; ret`` in its own libc, with the call's number and
   arguments, and with the stack pointer at that frame.
3. It makes the call. If gpucr is dead by then, it returns into the libc's signal restorer, and rt_sigreturn brings
   everything back. If not, gpucr takes the result, stops it before it runs any further, and sets its registers itself.

All signals are blocked from right after step 2 until the frame restores the mask; they stay pending.

If gpucr is killed in between, three things are imperfect. A call with a timeout that the thread was blocked in starts
over with its whole timeout, or fails with EINTR where the thread was interrupted before and its call's number is
unknown (interrupted_calls.py). A signal that arrives just then does not make such a call fail with EINTR, but finds the
thread about to make it. And a seccomp filter, otherwise suspended, sees the added call.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from msgspec import Struct

from gpucr.linux import memory, sigframe
from gpucr.linux.interrupted_calls import with_call_number
from gpucr.linux.memory import Mapping
from gpucr.linux.ptrace import StopKind, TracedThread
from gpucr.linux.registers import Registers

OPEN, CLOSE, MMAP, MPROTECT, MUNMAP, MADVISE, RECVMSG, SOCKETPAIR, DUP3 = 2, 3, 9, 10, 11, 28, 47, 53, 292
"""Numbers of system calls on x86-64 (arch/x86/entry/syscalls/syscall_64.tbl)."""

PROT_NONE, MAP_FIXED, MAP_NORESERVE = 0, 0x10, 0x4000
"""Arguments of mmap that Python's module does not define (include/uapi/asm-generic/mman*.h)."""

SCRATCH_BYTES = 256
"""How much of the thread's memory a caller may use for a call's data (see `scratch_address`)."""

_NT_X86_XSTATE, _XSTATE_MAX_BYTES = 0x202, 1 << 16  # include/uapi/linux/elf.h
_RED_ZONE_BYTES = 128  # the red zone below the stack pointer (System V ABI for x86-64)
_ALL_SIGNALS = (1 << 64) - 1
_CODE_SEGMENT_64 = 0x33  # of a thread in 64-bit mode (arch/x86/include/asm/segment.h)
_SYSCALL_RET = (bytes.fromhex("0f05c3"),)
_RESTORERS = (bytes.fromhex("48c7c00f0000000f05"), bytes.fromhex("b80f0000000f05"))  # mov $15,%rax or %eax; syscall
_LIBC_NAMES = ("libc.", "libc-", "ld-musl")
_SEARCHED_BYTES = 8 << 20  # per mapping: a libc has 2 MiB of code, a CUDA library up to 2 GiB
_RSEQ_CS_OFFSET, _RSEQ_CS = 8, struct.Struct("<IIQQQ")  # struct rseq_cs: version, flags, start, length, abort handler


class InjectionUnavailable(OSError):
    """System calls cannot be run in this thread; the text says why. Nothing was changed."""


class _Site(Struct, frozen=True):
    """Where in the process a call can be made and returned from, and the start of the thread's stack."""

    syscall: int
    restorer: int
    stack_start: int


class _Plan(Struct, frozen=True):
    """Everything needed before anything is changed. ``frame`` is written at ``frame_address``."""

    before: Registers
    signal_mask: int
    syscall: int
    frame_address: int
    frame: bytes
    is_filtered: bool


def run_syscall(thread: TracedThread, number: int, *arguments: int) -> int:
    """Run one system call in the thread and return its result. Stopped → stopped, all its state as it was.

    The thread may be at any stop but a call's entry. A signal that it was about to take stops it again later; but a
    failed memory access is repeated, without the signal. A call that it was blocked in stays interrupted: it is
    restarted when the thread continues, with what is left of a timeout, or fails with EINTR because of a signal.

    Raises OSError with the call's error; ProcessLookupError if the thread ends; InjectionUnavailable.
    """
    plan = _plan(thread)
    if thread.is_stopped_by_fault():
        thread.drop_signal()
    with _unfiltered(thread, plan):
        thread.write_memory(plan.frame_address, plan.frame)
        thread.set_registers(plan.before.for_call(plan.syscall, plan.frame_address, number, arguments))
        # Only now that the frame which restores the mask is in place. A signal being delivered goes back into the
        # queue.
        thread.set_signal_mask(_ALL_SIGNALS)
        result = _follow(thread)
        thread.set_signal_mask(plan.signal_mask)
        thread.set_registers(plan.before)
    if result < 0:
        raise OSError(-result, f"system call {number} in thread {thread.tid}: {os.strerror(-result)}")
    return result


def scratch_address(thread: TracedThread) -> int:
    """SCRATCH_BYTES of memory for the caller, while the thread is stopped or runs calls for it."""
    return _scratch_below(thread.registers().rsp)


def _scratch_below(stack_pointer: int) -> int:
    return _aligned(stack_pointer - _RED_ZONE_BYTES - SCRATCH_BYTES)


def _aligned(address: int) -> int:
    return address & -sigframe.FPU_ALIGNMENT_BYTES


def _follow(thread: TracedThread) -> int:
    """Let the thread make the call, and interrupt it before the next instruction. Returns the call's result."""
    while True:
        thread.resume_to_syscall(thread.last_stop.signal)
        stop = thread.wait()
        if stop.kind is StopKind.EXITED:
            raise ProcessLookupError(errno.ESRCH, f"thread {thread.tid} ended")
        if stop.kind is StopKind.SYSCALL_EXIT:
            after = thread.registers()
            if not after.is_in_interrupted_call:
                thread.interrupt()
                return after.result


def _plan(thread: TracedThread) -> _Plan:
    if thread.last_stop.kind is StopKind.SYSCALL_ENTRY:
        raise ValueError(f"thread {thread.tid} is about to make a system call of its own")
    is_filtered = _check_kind(thread)
    before = _out_of_rseq(thread, thread.registers())
    if before.cs != _CODE_SEGMENT_64:
        raise InjectionUnavailable(f"thread {thread.tid} runs 32-bit code")
    site = _find_site(thread, before.rsp, before.fs_base)
    fpu_state = sigframe.fpu_state(thread.register_set(_NT_X86_XSTATE, _XSTATE_MAX_BYTES))
    fpu_address = _aligned(_scratch_below(before.rsp) - len(fpu_state))
    frame_address = fpu_address - sigframe.FRAME_BYTES
    _check_room(thread, site.stack_start, frame_address, before.rsp)
    signal_mask = thread.signal_mask()
    # Sigreturn cannot return a thread into a call, nor resume a running timeout: the call is made again.
    back = with_call_number(before, thread.read_memory).about_to_call()
    frame = sigframe.frame(site.restorer, back, signal_mask, fpu_address)
    return _Plan(before, signal_mask, site.syscall, frame_address, frame + fpu_state, is_filtered)


def _check_kind(thread: TracedThread) -> bool:
    """Refuse threads in which calls cannot be made this way. Returns whether the thread has a seccomp filter."""
    machine = os.uname().machine
    if machine != "x86_64":
        raise InjectionUnavailable(f"system calls can be run in x86-64 threads only, not on {machine}")
    status = thread.status()
    if "shstk" in status.get("x86_Thread_features", "").split():
        raise InjectionUnavailable(f"thread {thread.tid} has a shadow stack, which allows no return without a call")
    return status.get("Seccomp", "0") != "0"


@contextlib.contextmanager
def _unfiltered(thread: TracedThread, plan: _Plan) -> Iterator[None]:
    """Suspend the thread's seccomp filter during the block: it could kill the process for a call."""
    if plan.is_filtered:
        try:
            thread.suspend_seccomp()
        except PermissionError as e:
            raise InjectionUnavailable(
                f"thread {thread.tid} has a seccomp filter, which can be suspended only with CAP_SYS_ADMIN and by a "
                "process that has none itself"
            ) from e
    try:
        yield
    finally:
        if plan.is_filtered:
            with contextlib.suppress(ProcessLookupError):
                thread.resume_seccomp()


def _out_of_rseq(thread: TracedThread, registers: Registers) -> Registers:
    """Where the thread was interrupted in a restartable sequence (rseq(2)), move it to the sequence's restart point.

    The kernel does so with every thread that it interrupts there, but would not notice with the thread sent elsewhere.
    """
    address = thread.rseq_address()
    sequence = int.from_bytes(thread.read_memory(address + _RSEQ_CS_OFFSET, 8), "little") if address else 0
    if not sequence:
        return registers
    _, _, start, length, abort_handler = _RSEQ_CS.unpack(thread.read_memory(sequence, _RSEQ_CS.size))
    changed = registers.copy()
    if start <= registers.rip < start + length:
        changed.rip = abort_handler
    return changed


def _check_room(thread: TracedThread, stack_start: int, lowest: int, stack_pointer: int) -> None:
    try:
        if lowest < stack_start:
            raise OSError(errno.EFAULT, f"{lowest:#x} lies below the stack, which begins at {stack_start:#x}")
        # Guard pages made with MADV_GUARD_INSTALL are not separate mappings. Try all pages before writing one.
        thread.read_memory(lowest, stack_pointer - lowest)
    except ProcessLookupError:
        raise
    except OSError as e:
        raise InjectionUnavailable(f"thread {thread.tid} has too little room left on its stack") from e


@functools.lru_cache(maxsize=64)
def _find_site(thread: TracedThread, stack_pointer: int, thread_pointer: int) -> _Site:
    """Cached per thread: while it is traced, its stack and its libc stay where they are."""
    maps = memory.read_maps(thread.tid)
    code = [m for m in maps if m.permissions.startswith("r-x") and (m.inode or m.path == "[vdso]")]
    code.sort(key=lambda mapping: not PurePath(mapping.path).name.startswith(_LIBC_NAMES))
    return _Site(
        syscall=_find_code(thread, code, _SYSCALL_RET),
        restorer=_find_code(thread, code, _RESTORERS),
        stack_start=_stack_start(thread, maps, stack_pointer, thread_pointer),
    )


def _find_code(thread: TracedThread, mappings: list[Mapping], wanted: Sequence[bytes]) -> int:
    for mapping in mappings:
        code = thread.read_memory(mapping.start, min(mapping.end - mapping.start, _SEARCHED_BYTES))
        for instructions in wanted:
            offset = code.find(instructions)
            if offset >= 0:
                return mapping.start + offset
    raise InjectionUnavailable(f"thread {thread.tid} has no libc that is known here")


def _stack_start(thread: TracedThread, maps: Sequence[Mapping], stack_pointer: int, thread_pointer: int) -> int:
    """The start of the mapping that is the thread's stack.

    Nothing else may use the memory below the stack pointer. That is certain for the main thread's stack, and for one
    made by pthread_create, with the thread's control block at its upper end; not for the stack of a coroutine or a
    signal handler, which can be anywhere.
    """
    for mapping in maps:
        is_hit = mapping.start < stack_pointer <= mapping.end and mapping.permissions.startswith("rw")
        if is_hit and (mapping.path == "[stack]" or stack_pointer <= thread_pointer < mapping.end):
            return mapping.start
    raise InjectionUnavailable(f"thread {thread.tid} runs on a stack of its own making")
