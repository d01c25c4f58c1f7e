"""Which system call a thread was interrupted in, after restart_syscall(2) has replaced its number.

An interrupted call with a timeout continues through restart_syscall, which waits for the rest of the time. From then on
the registers hold that number, and only the kernel knows which call it stands for. But the C library loads the original
number right before the call, in one of three ways (objdump of glibc 2.36 and 2.41):

- ``mov $number, %eax; syscall``: glibc before 2.41, musl without cancellation, Go;
- ``mov offset(%rsp), %rax; syscall``: glibc 2.41 in a process with one thread (``__internal_syscall_cancel``);
- ``__syscall_cancel_arch``, which gets the number in %rsi from its caller's stack: glibc 2.41 with several threads.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gpucr.linux.registers import Registers

RESTART_SYSCALL = 219
"""restart_syscall(2) on x86-64."""

_POLL, _NANOSLEEP, _FUTEX, _CLOCK_NANOSLEEP = 7, 35, 202, 230
_RESTARTABLE = (_POLL, _NANOSLEEP, _FUTEX, _CLOCK_NANOSLEEP)  # the calls that use set_restart_fn() in Linux 6.18
_SYSCALL_BYTES, _LONGEST_LOAD_BYTES, _CALL_BYTES, _ARGUMENTS_BYTES, _WORD_BYTES = 2, 7, 5, 32, 8
# The instruction that ends right before the call: mov $n,%eax or %rax, mov n(%rsp),%rax, mov n(%rbp),%rax
_LOAD = re.compile(
    rb"(?:(?:\xb8|\x48\xc7\xc0)(?P<number>.{4})|\x48\x8b(?:\x44\x24(?P<rsp>.)|\x45(?P<rbp>.)))\Z", re.DOTALL
)
_CANCEL_ARCH_END = bytes.fromhex("4c895c2408")  # mov %r11,8(%rsp): glibc's and musl's assembly end with it
# Among the caller's instructions before its call: mov n(%rsp),%rsi or mov n(%rbp),%rsi
_LOAD_ARGUMENT = re.compile(rb"\x48\x8b(?:\x74\x24(?P<rsp>.)|\x75(?P<rbp>.))", re.DOTALL)
_CALL = 0xE8

ReadMemory = Callable[[int, int], bytes]
"""Bytes of the process's memory: address, size in bytes. Raises OSError."""


def with_call_number(registers: Registers, read_memory: ReadMemory) -> Registers:
    """The same registers, with ``orig_rax`` the number of the interrupted call; unchanged if that is unknown.

    Raises ProcessLookupError if the process has ended.
    """
    if not registers.is_in_interrupted_call or registers.orig_rax != RESTART_SYSCALL:
        return registers
    try:
        number = _loaded_number(registers, read_memory)
    except ProcessLookupError:
        raise
    except OSError:
        return registers
    changed = registers.copy()
    if number in _RESTARTABLE:
        changed.orig_rax = number
    return changed


def _loaded_number(registers: Registers, read_memory: ReadMemory) -> int | None:
    call = registers.rip - _SYSCALL_BYTES
    code = read_memory(call - _LONGEST_LOAD_BYTES, _LONGEST_LOAD_BYTES)
    if code.endswith(_CANCEL_ARCH_END):
        return_address = _word(read_memory, registers.rsp)
        caller = read_memory(return_address - _CALL_BYTES - _ARGUMENTS_BYTES, _ARGUMENTS_BYTES + _CALL_BYTES)
        loads = list(_LOAD_ARGUMENT.finditer(caller, 0, _ARGUMENTS_BYTES))
        if not loads or caller[_ARGUMENTS_BYTES] != _CALL:
            return None
        return _on_stack(loads[-1], registers.rsp + _WORD_BYTES, registers.rbp, read_memory)
    load = _LOAD.search(code)
    if load is None:
        return None
    if load["number"] is not None:
        return int.from_bytes(load["number"], "little")
    return _on_stack(load, registers.rsp, registers.rbp, read_memory)


def _on_stack(load: re.Match[bytes], stack_pointer: int, frame_pointer: int, read_memory: ReadMemory) -> int:
    base, offset = (stack_pointer, load["rsp"]) if load["rsp"] is not None else (frame_pointer, load["rbp"])
    return _word(read_memory, base + int.from_bytes(offset, "little", signed=True))


def _word(read_memory: ReadMemory, address: int) -> int:
    return int.from_bytes(read_memory(address, _WORD_BYTES), "little")
