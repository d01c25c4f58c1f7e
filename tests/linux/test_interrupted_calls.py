"""The number of a system call replaced by restart_syscall(2) is read from the code that made it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.linux.interrupted_calls import RESTART_SYSCALL, with_call_number
from gpucr.linux.ptrace import HeldThreads, TracedThread
from gpucr.linux.registers import Registers
from tests.linux import exact
from tests.linux.exact import Exact

_POLL, _CLOCK_NANOSLEEP, _GETPID = 7, 230, 39
_RESTART_REST, _WHOLE = (1 << 64) - 516, (1 << 64) - 514  # -ERESTART_RESTARTBLOCK, -ERESTARTNOHAND
_CODE, _CALLER, _STACK, _FRAME = 0x10000, 0x20000, 0x30000, 0x30800
_CANCEL_ARCH = "4989fb4889f04889d74889ce4c89c24d89ca4c8b4424084c8b4c24104c895c2408"  # glibc 2.41, before the call
_CANCEL_CALLER = "4151 4c8d9b08030000 4989c9 4889f1 4150 488b742420 4989d0 4889fa 4c89df e878b30000"


class _Process:
    """Memory and registers of a thread that was interrupted in a call right behind ``before``."""

    def __init__(self, before: str, stack: dict[int, int], *, caller: str = "") -> None:
        self._pages = {base: bytearray(4096) for base in (_CODE, _CALLER, _STACK)}
        code = bytes.fromhex(before) + bytes.fromhex("0f05c3")
        self._pages[_CODE][64 : 64 + len(code)] = code
        called = bytes.fromhex(caller)
        self._pages[_CALLER][64 : 64 + len(called)] = called
        for address, word in {**stack, **({_STACK: _CALLER + 64 + len(called)} if caller else {})}.items():
            self._pages[_STACK][address - _STACK : address - _STACK + 8] = word.to_bytes(8, "little")
        self.registers = Registers(
            rip=_CODE + 64 + len(code) - 1, rsp=_STACK, rbp=_FRAME, orig_rax=RESTART_SYSCALL, rax=_RESTART_REST
        )

    def read(self, address: int, size_bytes: int) -> bytes:
        page = self._pages.get(address & -0x10000)
        if page is None:
            raise OSError(errno.EFAULT, "no memory there")
        return bytes(page[address & 0xFFFF : (address & 0xFFFF) + size_bytes])

    def number(self) -> int:
        return with_call_number(self.registers, self.read).orig_rax


@pytest.mark.parametrize(
    ("before", "stack", "caller", "number"),
    [
        pytest.param("b807000000", {}, "", _POLL, id="mov $7,%eax"),
        pytest.param("48c7c0e6000000", {}, "", _CLOCK_NANOSLEEP, id="mov $230,%rax"),
        pytest.param("488b442410", {_STACK + 16: _POLL}, "", _POLL, id="mov 16(%rsp),%rax"),
        pytest.param("488b4510", {_FRAME + 16: _POLL}, "", _POLL, id="mov 16(%rbp),%rax"),
        pytest.param("488b45f0", {_FRAME - 16: _POLL}, "", _POLL, id="mov -16(%rbp),%rax"),
        pytest.param(_CANCEL_ARCH, {_STACK + 8 + 32: _POLL}, _CANCEL_CALLER, _POLL, id="cancel, from the stack"),
        pytest.param(
            _CANCEL_ARCH, {_FRAME + 16: _POLL}, "488b7510 4989d0 e878b30000", _POLL, id="cancel, from the frame"
        ),
    ],
)
def test_the_syscall_number_is_found_where_libc_loads_it(
    before: str, stack: dict[int, int], caller: str, number: int
) -> None:
    assert _Process(before, stack, caller=caller).number() == number


@pytest.mark.parametrize(
    ("before", "stack", "caller"),
    [
        pytest.param("9090909090", {}, "", id="other code"),
        pytest.param("b827000000", {}, "", id="a call that is never restarted"),
        pytest.param("488b442410", {_STACK + 16: _GETPID}, "", id="another number on the stack"),
        pytest.param(_CANCEL_ARCH, {_STACK + 8 + 32: _POLL}, "9090909090", id="a caller that does not call"),
        pytest.param(_CANCEL_ARCH, {_STACK + 8 + 32: _POLL}, "4989d0 e878b30000", id="a caller that loads no number"),
        pytest.param(_CANCEL_ARCH, {_STACK: 0x90000}, "", id="a return address without memory"),
    ],
)
def test_an_unknown_syscall_number_is_left_alone(before: str, stack: dict[int, int], caller: str) -> None:
    assert _Process(before, stack, caller=caller).number() == RESTART_SYSCALL


def test_registers_of_other_threads_are_left_alone() -> None:
    process = _Process("b807000000", {})
    process.registers.rax = 0  # the call has returned
    assert process.number() == RESTART_SYSCALL
    process.registers.rax, process.registers.orig_rax = _RESTART_REST, _CLOCK_NANOSLEEP
    assert process.number() == _CLOCK_NANOSLEEP


def test_the_end_of_the_process_is_reported() -> None:
    def ended(address: int, size_bytes: int) -> bytes:
        raise ProcessLookupError(errno.ESRCH, "it ended")

    with pytest.raises(ProcessLookupError):
        with_call_number(_Process("b807000000", {}).registers, ended)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exact.build(tmp_path_factory.mktemp("exact"))


@pytest.fixture(
    params=[("poll", "thread"), ("poll", "main"), ("nanosleep", "thread"), ("nanosleep", "main")], ids=" ".join
)
def waiting(request: pytest.FixtureRequest, program: Path, tmp_path: Path) -> Iterator[Exact]:
    """A thread that waits in this machine's libc, and was interrupted in that before."""
    mode, where = request.param
    with exact.running(program, tmp_path, mode, where) as target:
        target.wait_blocked()
        for _ in range(2):
            thread = TracedThread.seize(target.tid)
            thread.detach()
            target.wait_blocked()
        yield target


def test_the_libc_of_this_machine_is_known(waiting: Exact) -> None:
    thread = TracedThread.seize(waiting.tid)
    try:
        found = thread.registers()
        assert found.orig_rax == RESTART_SYSCALL
        assert with_call_number(found, thread.read_memory).orig_rax in (_POLL, _CLOCK_NANOSLEEP)
    finally:
        thread.detach()
    assert waiting.results == 0


def test_a_held_thread_with_an_interrupted_call_restarts_it(waiting: Exact) -> None:
    """What CRIU finds then is a call that it can make again: it would end restart_syscall(2) with EINTR."""
    held = HeldThreads({waiting.pid: 0})
    held.hold()
    try:
        (thread,) = (thread for thread in held._held if thread.tid == waiting.tid)
        found: list[Registers] = []
        held._call(lambda: found.append(thread.registers()))
        assert found[0].orig_rax in (_POLL, _CLOCK_NANOSLEEP)
        assert found[0].rax == _WHOLE
    finally:
        held.release()
    waiting.wait_blocked()
    assert waiting.results == 0
