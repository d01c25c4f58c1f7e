"""The frame that a signal handler returns from: how the kernel can be asked to bring back a thread's whole state.

The kernel writes such a frame on a thread's stack when it calls a signal handler, and the handler's return leads to
rt_sigreturn(2), which takes general registers, floating point and vector state, and the signal mask back out of it
(struct rt_sigframe of arch/x86/include/asm/sigframe.h, struct ucontext and sigcontext_64 of arch/x86/include/uapi).
"""

from __future__ import annotations

import struct

from gpucr.linux.registers import Registers

FPU_ALIGNMENT_BYTES = 64
"""Of the floating point state (the XRSTOR instruction)."""

_FRAME = struct.Struct("<Q" "QQQiiQ" "18Q4H4QQ64x" "Q" "128x")  # fmt: skip
FRAME_BYTES = _FRAME.size
"""Without the floating point state."""

_UC_FP_XSTATE, _UC_SIGCONTEXT_SS, _UC_STRICT_RESTORE_SS = 1, 2, 4
# Neither SS_ONSTACK nor SS_DISABLE: the kernel refuses to set this alternate stack, says nothing, and leaves the one
# that is in force as it is. ptrace does not tell which that is (`restore_altstack` in kernel/signal.c).
_KEEP_ALTERNATE_STACK = 3

_MAGIC1, _MAGIC2 = 0x46505853, 0x46505845
_SOFTWARE_BYTES = struct.Struct("<IIQI28x")  # struct _fpx_sw_bytes
_SOFTWARE_OFFSET, _HEADER_OFFSET = 464, 512
_TILE_DATA, _TILE_DATA_BYTES = 1 << 18, 8192  # AMX


def fpu_state(xsave: bytes) -> bytes:
    """The floating point state as rt_sigreturn wants it, from what ptrace tells of it (NT_X86_XSTATE)."""
    (features,) = struct.unpack_from("<Q", xsave, _SOFTWARE_OFFSET)  # all that the kernel lets programs use
    (in_use,) = struct.unpack_from("<Q", xsave, _HEADER_OFFSET)
    state = bytearray(xsave + struct.pack("<I", _MAGIC2))
    size_bytes = len(xsave)
    if features & _TILE_DATA and not in_use & _TILE_DATA:
        # A thread has room for AMX tiles, the last part of the area, from its first use of them on. ptrace tells of
        # them always, so both is possible here; the kernel looks for the mark at the end of what there is room for.
        size_bytes -= _TILE_DATA_BYTES
        struct.pack_into("<I", state, size_bytes, _MAGIC2)
    _SOFTWARE_BYTES.pack_into(state, _SOFTWARE_OFFSET, _MAGIC1, len(state), features, size_bytes)
    return bytes(state)


def frame(restorer: int, registers: Registers, signal_mask: int, fpu_address: int) -> bytes:
    """The frame that brings these registers back. ``restorer`` is where code lies that calls rt_sigreturn.

    A thread whose stack pointer is the frame's address and which executes ``ret`` takes it.
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
