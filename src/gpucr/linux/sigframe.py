"""Signal frames: a way to have the kernel restore a thread's whole state.

The kernel writes such a frame to a thread's stack when it calls a signal handler, and the handler returns into
rt_sigreturn(2), which restores general registers, floating point and vector state, and the signal mask from it (struct
rt_sigframe of arch/x86/include/asm/sigframe.h, struct ucontext and sigcontext_64 of arch/x86/include/uapi).
"""

from __future__ import annotations

import struct

from gpucr.linux.registers import Registers

FPU_ALIGNMENT_BYTES = 64
"""Alignment of the floating point state (the XRSTOR instruction)."""

_FRAME = struct.Struct("<Q" "QQQiiQ" "18Q4H4QQ64x" "Q" "128x")  # fmt: skip
FRAME_BYTES = _FRAME.size
"""Without the floating point state."""

_UC_FP_XSTATE, _UC_SIGCONTEXT_SS, _UC_STRICT_RESTORE_SS = 1, 2, 4
# Neither SS_ONSTACK nor SS_DISABLE: the kernel silently refuses to set this alternate stack and keeps the current one,
# which ptrace does not show (`restore_altstack` in kernel/signal.c).
_KEEP_ALTERNATE_STACK = 3

_MAGIC1, _MAGIC2 = 0x46505853, 0x46505845
_SOFTWARE_BYTES = struct.Struct("<IIQI28x")  # struct _fpx_sw_bytes
_SOFTWARE_OFFSET, _HEADER_OFFSET = 464, 512
_TILE_DATA, _TILE_DATA_BYTES = 1 << 18, 8192  # AMX


def fpu_state(xsave: bytes) -> bytes:
    """The floating point state as rt_sigreturn wants it, from what ptrace reports (NT_X86_XSTATE)."""
    (features,) = struct.unpack_from("<Q", xsave, _SOFTWARE_OFFSET)  # all features that the kernel lets programs use
    (in_use,) = struct.unpack_from("<Q", xsave, _HEADER_OFFSET)
    state = bytearray(xsave + struct.pack("<I", _MAGIC2))
    size_bytes = len(xsave)
    if features & _TILE_DATA and not in_use & _TILE_DATA:
        # A thread has space for AMX tiles, the last part of the area, only from their first use on. ptrace always
        # includes them, so both sizes are possible here; the kernel expects the end mark after the space that the
        # thread has.
        size_bytes -= _TILE_DATA_BYTES
        struct.pack_into("<I", state, size_bytes, _MAGIC2)
    _SOFTWARE_BYTES.pack_into(state, _SOFTWARE_OFFSET, _MAGIC1, len(state), features, size_bytes)
    return bytes(state)


def frame(restorer: int, registers: Registers, signal_mask: int, fpu_address: int) -> bytes:
    """The frame that restores these registers. ``restorer`` is the address of code that calls rt_sigreturn.

    A thread that executes ``ret`` with its stack pointer at the frame's address uses it.
    """
    r = registers
    return _FRAME.pack(
        restorer,
        _UC_FP_XSTATE | _UC_SIGCONTEXT_SS | _UC_STRICT_RESTORE_SS, 0,
        0, _KEEP_ALTERNATE_STACK, 0, 0,
        r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx, r.rdx, r.rax, r.rcx, r.rsp,
        r.rip, r.eflags,
        r.cs, 0, 0, r.ss,
        0, 0, 0, 0,
        fpu_address,
        signal_mask,
    )  # fmt: skip
