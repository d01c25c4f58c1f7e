"""The general registers of an x86-64 thread, and what they say about the system call that it was stopped in."""

from __future__ import annotations

import ctypes

_ERESTARTSYS, _ERESTARTNOINTR, _ERESTARTNOHAND, _ERESTART_RESTARTBLOCK = 512, 513, 514, 516  # include/linux/errno.h
_RESTARTED = (_ERESTARTSYS, _ERESTARTNOINTR, _ERESTARTNOHAND, _ERESTART_RESTARTBLOCK)
_SYSCALL_INSTRUCTION_BYTES = 2
_WORD = 1 << 64
_NO_CALL = _WORD - 1
_NAMES = (
    "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi",
    "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs",
)  # fmt: skip


class Registers(ctypes.Structure):
    """struct user_regs_struct (arch/x86/include/asm/user_64.h); unsigned numbers.

    In a thread that was stopped inside a system call, ``orig_rax`` is the call's number, and ``rax`` may be one of the
    kernel's own -ERESTART... codes: what becomes of them depends on the next signals.
    """

    r15: int
    r14: int
    r13: int
    r12: int
    rbp: int
    rbx: int
    r11: int
    r10: int
    r9: int
    r8: int
    rax: int
    rcx: int
    rdx: int
    rsi: int
    rdi: int
    orig_rax: int
    rip: int
    cs: int
    eflags: int
    rsp: int
    ss: int
    fs_base: int
    gs_base: int
    ds: int
    es: int
    fs: int
    gs: int

    _fields_ = [(name, ctypes.c_uint64) for name in _NAMES]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registers) and bytes(self) == bytes(other)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Registers({', '.join(f'{name}={getattr(self, name):#x}' for name in _NAMES)})"

    def copy(self) -> Registers:
        """A copy."""
        return Registers.from_buffer_copy(self)

    @property
    def result(self) -> int:
        """At a call's exit: its result, negative for an error."""
        return self.rax - _WORD if self.rax >> 63 else self.rax

    @property
    def is_in_interrupted_call(self) -> bool:
        """Whether the thread was stopped inside a system call that the kernel may restart."""
        return self.orig_rax >> 63 == 0 and -self.result in _RESTARTED

    def with_full_timeout(self) -> Registers:
        """Make an interrupted call that would wait for the rest of its timeout start over with all of it."""
        changed = self.copy()
        if self.is_in_interrupted_call and -self.result == _ERESTART_RESTARTBLOCK:
            changed.rax = _WORD - _ERESTARTNOHAND
        return changed

    def about_to_call(self) -> Registers:
        """Outside the kernel, about to make the interrupted call again: a state that sigreturn can produce."""
        changed = self.copy()
        if self.is_in_interrupted_call:
            changed.rip = self.rip - _SYSCALL_INSTRUCTION_BYTES
            changed.rax = self.orig_rax
        changed.orig_rax = _NO_CALL
        return changed

    def for_call(self, instruction: int, stack_pointer: int, number: int, arguments: tuple[int, ...]) -> Registers:
        """About to make another system call with the instruction there, and not to restart an interrupted one."""
        changed = self.copy()
        changed.rip, changed.rsp = instruction, stack_pointer
        changed.rax, changed.orig_rax = number, _NO_CALL
        for name, value in zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), arguments, strict=False):
            setattr(changed, name, value % _WORD)
        return changed
