"""System calls run in another process's threads: they work, and the thread continues as if nothing had happened."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
from collections.abc import Callable, Iterator
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ, PROT_WRITE
from pathlib import Path

import pytest

from gpucr.linux import injection, ptrace
from gpucr.linux.injection import MADVISE, MMAP, MPROTECT, MUNMAP, InjectionUnavailable, run_syscall
from gpucr.linux.ptrace import Stop, StopKind, TracedThread
from gpucr.linux.registers import Registers
from tests.children import python
from tests.counter import wait_until
from tests.linux import exact
from tests.linux.exact import Exact, StartExact
from tests.storm import later, sample

pytestmark = [
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="system calls are run in x86-64 threads only"),
    pytest.mark.in_turn,
]

_NT_X86_XSTATE = 0x202
_BLOCKED_IN = ("poll", "read", "futex", "nanosleep", "sigsuspend")
_READ_WRITE, _PRIVATE = PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exact.build(tmp_path_factory.mktemp("exact"))


@pytest.fixture
def start(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartExact]:
    """Start programs that notice changes; they are ended with the test."""
    with contextlib.ExitStack() as started:

        def start_one(mode: str, where: str = "thread") -> Exact:
            return started.enter_context(exact.running(program, tmp_path_factory.mktemp("run"), mode, where))

        yield start_one


@contextlib.contextmanager
def _traced(target: Exact) -> Iterator[TracedThread]:
    thread = TracedThread.seize(target.tid)
    try:
        yield thread
    finally:
        thread.detach(thread.last_stop.signal)


def _map_page(thread: TracedThread) -> int:
    return run_syscall(thread, MMAP, 0, 4096, _READ_WRITE, _PRIVATE, -1, 0)


# --- the call, and the state around it -------------------------------------------------------------------------


def test_injected_calls_work_and_return_their_errors(start: StartExact) -> None:
    with _traced(start("spin")) as thread:
        address = _map_page(thread)
        thread.write_memory(address, b"content")
        assert thread.read_memory(address, 7) == b"content"
        assert run_syscall(thread, MPROTECT, address, 4096, PROT_READ) == 0
        assert run_syscall(thread, MUNMAP, address, 4096) == 0
        with pytest.raises(OSError, match=f"system call {MADVISE} in thread {thread.tid}") as failure:
            run_syscall(thread, MADVISE, address, 4096, 0)
        assert failure.value.errno == errno.ENOMEM


@pytest.mark.parametrize("where", ["thread", later("main")])
def test_a_computing_thread_keeps_all_its_registers(start: StartExact, where: str) -> None:
    target = start("spin", where)
    with _traced(target) as thread:
        for _ in range(1000):
            before = _state(thread)
            run_syscall(thread, MADVISE, 0, 0, 0)
            assert _state(thread) == before
            thread.resume()
            thread.stop()
    target.assert_goes_on()


def _state(thread: TracedThread) -> tuple[Registers, bytes, int]:
    return thread.registers(), thread.register_set(_NT_X86_XSTATE, 1 << 16), thread.signal_mask()


@pytest.mark.parametrize("mode", _BLOCKED_IN)
def test_a_blocking_call_keeps_blocking(start: StartExact, mode: str) -> None:
    target = start(mode)
    target.wait_blocked()
    with _traced(target) as thread:
        for _ in range(100):
            before = thread.registers()
            assert before.is_in_interrupted_call
            run_syscall(thread, MADVISE, 0, 0, 0)
            assert thread.registers() == before
            thread.resume()
            target.wait_blocked()
            thread.stop()
    target.wait_blocked()
    assert target.results == 0
    _end_call(target, mode)


def _end_call(target: Exact, mode: str) -> None:
    """The call still does what it is there for."""
    if mode in ("poll", "read"):
        target.complete_call()
        target.assert_returned(1)
    else:
        os.kill(target.pid, signal.SIGUSR1)
        target.assert_returned(-errno.EINTR)
        assert target.signals == 1


@pytest.mark.parametrize("mode", _BLOCKED_IN)
def test_a_signal_during_the_call_interrupts_the_blocked_call(start: StartExact, mode: str) -> None:
    target = start(mode)
    target.wait_blocked()
    with _traced(target) as thread:
        run_syscall(thread, MADVISE, 0, 0, 0)
        os.kill(target.pid, signal.SIGUSR1)
        run_syscall(thread, MADVISE, 0, 0, 0)
    target.assert_returned(-errno.EINTR)
    assert target.signals == 1


def test_a_thread_at_the_exit_of_a_call_keeps_its_result(start: StartExact) -> None:
    target = start("read")
    target.wait_blocked()
    with _traced(target) as thread:
        thread.resume_to_syscall()
        target.complete_call()
        while thread.wait().kind is not StopKind.SYSCALL_EXIT or thread.registers().is_in_interrupted_call:
            thread.resume_to_syscall(thread.last_stop.signal)
        before = thread.registers()
        run_syscall(thread, MADVISE, 0, 0, 0)
        assert thread.registers() == before
    target.assert_returned(1)


def test_no_call_is_injected_at_the_entry_of_another(start: StartExact) -> None:
    with _traced(start("spin")) as thread:
        thread.resume_to_syscall()
        assert thread.wait().kind is StopKind.SYSCALL_ENTRY
        with pytest.raises(ValueError, match="about to make a system call"):
            run_syscall(thread, MADVISE, 0, 0, 0)
        assert thread.stop().kind is not StopKind.SYSCALL_ENTRY
        run_syscall(thread, MADVISE, 0, 0, 0)


# --- signals ---------------------------------------------------------------------------------------------------


def test_a_pending_signal_stops_the_thread_again(start: StartExact) -> None:
    target = start("spin")
    with _traced(target) as thread:
        _stop_for_signal(thread, target)
        for _ in range(3):
            run_syscall(thread, MADVISE, 0, 0, 0)
        thread.resume()
        assert thread.wait() == Stop(StopKind.SIGNAL, signal.SIGUSR1)
        thread.resume(signal.SIGUSR1)
        wait_until(lambda: target.signals == 1, "the signal to be taken")
        thread.stop()
    target.assert_goes_on()
    assert target.signals == 1


def _stop_for_signal(thread: TracedThread, target: Exact) -> None:
    thread.resume()
    os.kill(target.pid, signal.SIGUSR1)
    assert thread.wait() == Stop(StopKind.SIGNAL, signal.SIGUSR1)


def test_signals_during_calls_are_all_delivered(start: StartExact) -> None:
    target = start("spin")
    with _traced(target) as thread:
        for sent in range(1, 101):
            os.kill(target.pid, signal.SIGUSR1)
            run_syscall(thread, MADVISE, 0, 0, 0)
            thread.resume()
            assert thread.wait() == Stop(StopKind.SIGNAL, signal.SIGUSR1)
            thread.resume(signal.SIGUSR1)
            wait_until(lambda sent=sent: target.signals == sent, "the signal to be taken")  # type: ignore[misc]
            thread.stop()
    target.assert_goes_on()


def test_a_stop_of_the_process_stays_in_force(start: StartExact) -> None:
    target = start("spin")
    with _traced(target) as thread:
        os.kill(target.pid, signal.SIGSTOP)
        address = _map_page(thread)
        thread.write_memory(address, b"content")
    wait_until(lambda: target.status() == "T", "the thread to be stopped")
    with _traced(target) as thread:
        assert thread.last_stop.kind is StopKind.GROUP_STOP
        run_syscall(thread, MUNMAP, address, 4096)
    wait_until(lambda: target.status() == "T", "the thread to be stopped again")
    os.kill(target.pid, signal.SIGCONT)
    target.assert_goes_on()


def test_memory_can_be_mapped_under_a_faulting_access(start: StartExact) -> None:
    target = start("fault")
    with _traced(target) as thread:
        target.give_start()
        thread.resume()
        assert thread.wait() == Stop(StopKind.SIGNAL, signal.SIGSEGV)
        address = thread.signal_fault_address()
        assert address == target.number(6)
        run_syscall(thread, MADVISE, 0, 0, 0)
        thread.resume()
        assert thread.wait() == Stop(StopKind.SIGNAL, signal.SIGSEGV)  # nothing has changed yet
        run_syscall(thread, MPROTECT, address, 4096, PROT_READ)
    target.assert_goes_on()


def test_a_fault_signal_sent_by_another_process_is_kept(start: StartExact) -> None:
    target = start("spin")
    with _traced(target) as thread:
        thread.resume()
        os.kill(target.pid, signal.SIGSEGV)
        for _ in range(3):
            assert thread.wait() == Stop(StopKind.SIGNAL, signal.SIGSEGV)
            run_syscall(thread, MADVISE, 0, 0, 0)
            thread.resume()
        assert thread.wait() == Stop(StopKind.SIGNAL, signal.SIGSEGV)
    assert target.child.reap() == -signal.SIGSEGV


# --- whoever traces is killed ----------------------------------------------------------------------------------


class _Killer:
    """Ends this process by SIGKILL in the ``number``-th of the counted acts: before it or after it."""

    def __init__(self, number: int, *, after: bool) -> None:
        self._left = number
        self._after = after

    def around(self, act: Callable[..., object]) -> Callable[..., object]:
        def acting(*arguments: object, **named: object) -> object:
            self._left -= 1
            is_last = self._left == 0  # acts are made of others
            if is_last and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = act(*arguments, **named)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return acting


def _killed_in_every_act(monkeypatch: pytest.MonkeyPatch, trace: Callable[[], None]) -> Iterator[None]:
    """Run ``trace`` in a process of its own that is killed in one act after the other; yields after each of them."""
    for after in (False, True):
        for number in range(1, 1000):
            with monkeypatch.context() as patch:
                killer = _Killer(number, after=after)
                patch.setattr(ptrace, "_ptrace", killer.around(ptrace._ptrace))
                patch.setattr(TracedThread, "write_memory", killer.around(TracedThread.write_memory))
                patch.setattr(TracedThread, "wait", killer.around(TracedThread.wait))
                status = _in_a_process(trace)
            yield
            if status == 0:
                assert number > 20  # or it did not do what it was to be killed in
                break
            assert os.WIFSIGNALED(status), "the tracer failed by itself"
        else:
            pytest.fail("the tracer never came to its end")


def _in_a_process(act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def test_a_computing_thread_survives_the_death_of_its_tracer_at_any_moment(
    start: StartExact, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = start("spin")

    def trace() -> None:
        with _traced(target) as thread:
            run_syscall(thread, MADVISE, 0, 0, 0)

    for _ in _killed_in_every_act(monkeypatch, trace):
        target.assert_goes_on()


@pytest.mark.parametrize(("mode", "where"), sample([*((mode, "thread") for mode in _BLOCKED_IN), ("poll", "main")], 9))
def test_a_blocked_thread_survives_the_death_of_its_tracer_at_any_moment(
    start: StartExact, monkeypatch: pytest.MonkeyPatch, mode: str, where: str
) -> None:
    target = start(mode, where)
    target.wait_blocked()

    def trace() -> None:
        with _traced(target) as thread:
            run_syscall(thread, MADVISE, 0, 0, 0)

    for _ in _killed_in_every_act(monkeypatch, trace):
        target.wait_blocked()
    assert target.results == 0
    _end_call(target, mode)


def test_a_signal_survives_the_death_of_the_tracer_at_any_moment(
    start: StartExact, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = start("spin")
    told, tell = os.pipe()

    def trace() -> None:
        with _traced(target) as thread:
            thread.resume()
            os.write(tell, b"x")
            os.kill(target.pid, signal.SIGUSR1)
            assert thread.wait() == Stop(StopKind.SIGNAL, signal.SIGUSR1)
            run_syscall(thread, MADVISE, 0, 0, 0)
            thread.resume()
            assert thread.wait() == Stop(StopKind.SIGNAL, signal.SIGUSR1)

    sent = 0
    os.set_blocking(told, False)
    for _ in _killed_in_every_act(monkeypatch, trace):
        with contextlib.suppress(BlockingIOError):
            sent += len(os.read(told, 10))
        target.assert_goes_on()
        assert target.signals == sent
    assert sent > 20
    os.close(told)
    os.close(tell)


@pytest.mark.parametrize("mode", ["spin", "read"])
def test_the_end_of_the_thread_is_reported_and_it_can_be_reaped(
    start: StartExact, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The process is killed in one act of its tracer after the other, but the first (it is not traced) and the last."""
    real, acts, victim, kill_at = ptrace._ptrace, 0, 0, 0

    def kill_in_time(*arguments: int, **named: int) -> None:
        nonlocal acts
        acts += 1
        if acts == kill_at:
            os.kill(victim, signal.SIGKILL)
        real(*arguments, **named)

    monkeypatch.setattr(ptrace, "_ptrace", kill_in_time)
    with _traced(start(mode)) as thread:
        run_syscall(thread, MADVISE, 0, 0, 0)
    assert acts > 10
    for kill_at in range(2, acts):  # noqa: B007 - read by kill_in_time
        target = start(mode)
        victim, acts = target.pid, 0
        with pytest.raises(ProcessLookupError), _traced(target) as thread:
            run_syscall(thread, MADVISE, 0, 0, 0)
        assert target.child.reap() == -signal.SIGKILL


# --- threads in which it cannot be done ------------------------------------------------------------------------


def test_a_seccomp_filter_is_suspended_for_the_call_only(start: StartExact) -> None:
    target = start("filtered")
    with _traced(target) as thread:
        address = _map_page(thread)
        thread.write_memory(address, b"content")
        _stop_for_signal(thread, target)
        thread.resume(signal.SIGUSR1)  # it makes a call that the filter does not let pass
        assert thread.wait() == Stop(StopKind.EXITED)
    assert target.child.reap() == -signal.SIGSYS


def test_a_seccomp_filter_that_cannot_be_suspended_is_refused(start: StartExact) -> None:
    target = start("filtered")

    def trace() -> None:
        _filter_own_calls()
        with _traced(target) as thread, pytest.raises(InjectionUnavailable, match="seccomp filter"):
            _map_page(thread)

    assert _in_a_process(trace) == 0
    target.assert_goes_on()


def _filter_own_calls() -> None:
    """Set a seccomp filter that lets all calls pass; a process with a filter may not suspend that of another."""
    allow_all = ctypes.create_string_buffer(struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000), 8)
    program = ctypes.create_string_buffer(struct.pack("<H6xQ", 1, ctypes.addressof(allow_all)), 16)
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program))) == 0


def test_a_custom_stack_is_refused(start: StartExact) -> None:
    target = start("own stack")
    target.assert_goes_on()
    with _traced(target) as thread, pytest.raises(InjectionUnavailable, match="stack of its own making"):
        _map_page(thread)
    target.assert_goes_on()


def test_a_stack_without_room_is_refused(start: StartExact) -> None:
    target = start("full stack")
    target.assert_goes_on()
    with _traced(target) as thread, pytest.raises(InjectionUnavailable, match="too little room"):
        run_syscall(thread, MADVISE, 0, 0, 0)
    target.assert_goes_on()


@pytest.mark.parametrize(
    ("where", "name", "changed", "reason"),
    [
        (TracedThread, "status", lambda _: {"x86_Thread_features": "shstk"}, "shadow stack"),
        (injection, "_RESTORERS", (b"code that no process has",), "no libc"),
        (os, "uname", lambda: os.uname_result(["Linux", "host", "6.18", "1", "aarch64"]), "aarch64"),
    ],
)
def test_the_reason_is_reported(
    start: StartExact, monkeypatch: pytest.MonkeyPatch, where: object, name: str, changed: object, reason: str
) -> None:
    target = start("spin")
    with _traced(target) as thread, monkeypatch.context() as patch:
        patch.setattr(where, name, changed)
        with pytest.raises(InjectionUnavailable, match=reason):
            run_syscall(thread, MADVISE, 0, 0, 0)
    target.assert_goes_on()


def test_a_restartable_sequence_restarts(start: StartExact) -> None:
    target = start("restartable")
    target.assert_goes_on()
    first, end, abort_handler = (target.number(i) for i in (6, 7, 8))
    with _traced(target) as thread:
        assert first <= thread.registers().rip < end
        run_syscall(thread, MADVISE, 0, 0, 0)
        assert thread.registers().rip == abort_handler
    target.assert_goes_on()


def test_it_works_in_a_python_program() -> None:
    with python("import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.001)") as child:
        thread = TracedThread.seize(child.pid)
        for _ in range(100):
            run_syscall(thread, MUNMAP, _map_page(thread), 4096)
            thread.resume()
            thread.stop()
        thread.detach()
