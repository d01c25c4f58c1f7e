"""A system call filter that hides io_uring, which CRIU cannot dump (seccomp(2)).

A library that gets ENOSYS assumes a kernel without io_uring and uses epoll or threads instead.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from gpucr.linux import capabilities, libc

_IO_URING_SETUP, _IO_URING_REGISTER = 425, 427  # io_uring_enter is between them: uapi/asm-generic/unistd.h
_X32_BIT = 0x40000000  # set in the numbers of x32 calls, uapi/asm/unistd.h
_AUDIT_ARCH_X86_64 = 0xC000003E  # uapi/linux/audit.h

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2  # uapi/linux/prctl.h, uapi/linux/seccomp.h
_RET_ALLOW, _RET_ERRNO = 0x7FFF0000, 0x00050000
_LOAD_WORD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # uapi/linux/bpf_common.h
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET = 0, 4  # struct seccomp_data

_prctl = libc.function("prctl", ctypes.c_int, *[ctypes.c_ulong] * 4)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def can_refuse_io_uring() -> bool:
    """Whether this process may call `refuse_io_uring`: it has CAP_SYS_ADMIN, or no_new_privs is already set.

    The kernel requires one of them, so that a filter cannot mislead a setuid program. Setting no_new_privs is not an
    option: setuid programs (sudo, ping) would no longer work in the job.
    """
    own = capabilities.own()
    return own.has("SYS_ADMIN") or own.no_new_privs


def refuse_io_uring() -> None:
    """Make io_uring_setup, -enter and -register fail with ENOSYS in this thread and in all that it starts from now on.

    Irreversible, and kept across execve. Call it between fork and exec, or in a process with one thread. Calls of
    32-bit and x32 programs, which have no CUDA, are allowed. Raises OSError (EACCES: see `can_refuse_io_uring`; EINVAL:
    a kernel without CONFIG_SECCOMP_FILTER).
    """
    instructions = b"".join(
        [
            _instruction(_LOAD_WORD, _ARCHITECTURE_OFFSET),
            _instruction(_JUMP_IF_EQUAL, _AUDIT_ARCH_X86_64, if_false=5),
            _instruction(_LOAD_WORD, _NUMBER_OFFSET),
            _instruction(_JUMP_IF_AT_LEAST, _X32_BIT, if_true=3),
            _instruction(_JUMP_IF_AT_LEAST, _IO_URING_REGISTER + 1, if_true=2),
            _instruction(_JUMP_IF_AT_LEAST, _IO_URING_SETUP, if_false=1),
            _instruction(_RETURN, _RET_ERRNO | errno.ENOSYS),
            _instruction(_RETURN, _RET_ALLOW),
        ]
    )
    program = _Program(len(instructions) // 8, instructions)
    libc.check(_prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0), "prctl(PR_SET_SECCOMP)")


def _instruction(code: int, operand: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """struct sock_filter. The jumps count instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, operand)
