"""Holding threads, and watching single ones: which run, what is reported, and that nothing is lost."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

import pytest

from gpucr.linux import processes
from gpucr.linux.ptrace import HeldThreads, Stop, StopKind, TracedThread
from tests.children import tracer_of, unused_pid
from tests.counter import wait_until
from tests.counting import Counting, StartCounting
from tests.storm import IS_STORM

Hold = Callable[[Mapping[int, int]], HeldThreads]


@pytest.fixture
def hold(start_counting: StartCounting) -> Iterator[Hold]:
    """Hold threads; at the end of the test all are let go, or the target could not be collected."""
    all_held: list[HeldThreads] = []

    def begin(free_threads: Mapping[int, int]) -> HeldThreads:
        held = HeldThreads(free_threads)
        all_held.append(held)
        held.hold()
        return held

    yield begin
    for held in all_held:
        held.release()


def test_all_threads_but_one_are_stopped_until_released(target: Counting, hold: Hold) -> None:
    free = target.workers[1]
    held = hold({target.pid: free})
    target.assert_only_this_runs(free)
    assert [tid for tid, tracer in target.tracers().items() if tracer == 0] == [free]
    held.release()
    target.assert_untouched()


def test_several_processes_are_held_together(start_counting: StartCounting, target: Counting, hold: Hold) -> None:
    other = start_counting()
    held = hold({target.pid: target.workers[0], other.pid: other.workers[3]})
    target.assert_only_this_runs(target.workers[0])
    other.assert_only_this_runs(other.workers[3])
    held.release()
    target.assert_untouched()
    other.assert_untouched()


def test_releasing_a_process_that_is_not_held_does_nothing(target: Counting) -> None:
    held = HeldThreads({target.pid: target.workers[0]})
    held.release()
    held.hold()
    held.release()
    held.release()
    target.assert_untouched()


def test_no_signal_is_lost(start_counting: StartCounting, hold: Hold) -> None:
    target = start_counting("flood")
    for _ in range(50 if IS_STORM else 15):
        wait_until(lambda: target.signals > 0, "the flood of signals")
        hold({target.pid: target.workers[0]}).release()
    target.end_flood()
    # real-time signals queue up, so each one that is dropped shows
    wait_until(lambda: target.signals == target.sent, "every signal to be taken", timeout_s=10)


def test_a_signal_for_a_held_thread_is_delivered_after_release(target: Counting, hold: Hold) -> None:
    free, other = target.workers[:2]
    held = hold({target.pid: free})
    _signal_thread(target.pid, other, signal.SIGRTMIN)
    target.assert_only_this_runs(free)
    assert target.signals == 0
    held.release()
    wait_until(lambda: target.signals == 1, "the signal to be taken")


def _signal_thread(pid: int, tid: int, number: int) -> None:
    source = f"import ctypes; assert ctypes.CDLL(None).tgkill({pid}, {tid}, {number}) == 0"
    subprocess.run([sys.executable, "-I", "-c", source], check=True, timeout=30)


def test_threads_that_start_or_end_meanwhile_are_held_or_skipped(start_counting: StartCounting, hold: Hold) -> None:
    target = start_counting("spawning")
    wait_until(lambda: target.spawned > 0, "the first thread to be spawned")
    for _ in range(20):
        held = hold({target.pid: target.workers[0]})
        threads, spawned = processes.threads(target.pid), target.spawned
        target.assert_only_this_runs(target.workers[0])
        assert (processes.threads(target.pid), target.spawned) == (threads, spawned)
        held.release()
        _wait_for_more(target, spawned)


def test_an_ended_main_thread_is_skipped(start_counting: StartCounting, hold: Hold) -> None:
    target = start_counting("main thread ends")
    wait_until(lambda: target.states()[target.pid] == "Z", "the main thread to end")
    held = hold({target.pid: target.workers[0]})
    target.assert_only_this_runs(target.workers[0])
    held.release()
    target.assert_untouched()


def test_a_process_killed_while_held_can_be_reaped(target: Counting, hold: Hold) -> None:
    held = hold({target.pid: target.workers[0]})
    os.kill(target.pid, signal.SIGKILL)
    held.release()
    assert target.child.reap() == -signal.SIGKILL


def test_an_ended_process_is_skipped(start_counting: StartCounting, hold: Hold) -> None:
    target = start_counting()
    target.child.close()
    held = hold({target.pid: target.workers[0]})
    held.release()


def test_threads_continue_when_their_holder_is_killed(target: Counting) -> None:
    source = (
        "import sys, signal; from gpucr.linux.ptrace import HeldThreads, Stop, StopKind, TracedThread\n"
        "HeldThreads({int(sys.argv[1]): int(sys.argv[2])}).hold(); print('held', flush=True); signal.pause()"
    )
    arguments = [sys.executable, "-c", source, str(target.pid), str(target.workers[0])]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        target.assert_only_this_runs(target.workers[0])
        assert [tid for tid, tracer in target.tracers().items() if tracer == 0] == [target.workers[0]]
        holder.kill()
    target.assert_untouched()
    assert not set(target.states().values()) & {"T", "t"}


def test_a_traced_process_is_refused_and_nothing_stays_held(target: Counting) -> None:
    with tracer_of(target.workers[-1]) as tracer:
        held = HeldThreads({target.pid: target.workers[0]})
        with pytest.raises(PermissionError, match=f"ptrace of thread {target.workers[-1]}"):
            held.hold()
        target.advance(target.workers)
        assert set(target.tracers().values()) == {0, tracer.pid}


def test_stopped_then_held_then_continued(target: Counting, hold: Hold) -> None:
    free = target.workers[2]
    os.kill(target.pid, signal.SIGSTOP)
    target.wait_stopped()
    held = hold({target.pid: free})
    counts = target.counts()
    assert target.states()[free] == "T"
    os.kill(target.pid, signal.SIGCONT)
    target.assert_only_this_runs(free)
    assert {tid: count for tid, count in target.counts().items() if tid != free} == {
        tid: count for tid, count in counts.items() if tid != free
    }
    held.release()
    target.assert_untouched()


def test_held_then_stopped_then_released_never_runs_in_between(target: Counting, hold: Hold) -> None:
    free, *others = target.workers
    held = hold({target.pid: free})
    counts = target.counts()
    os.kill(target.pid, signal.SIGSTOP)
    held.release()
    target.wait_stopped()
    assert [target.counts()[tid] for tid in others] == [counts[tid] for tid in others]
    assert set(target.tracers().values()) == {0}
    os.kill(target.pid, signal.SIGCONT)
    target.assert_untouched()


def _wait_for_more(target: Counting, spawned: int) -> None:
    wait_until(lambda: target.spawned > spawned, "more threads to be spawned")


# --- one thread, watched ---------------------------------------------------------------------------------------


@pytest.fixture
def thread(target: Counting) -> Iterator[TracedThread]:
    """A worker, which takes SIGRTMIN and is mostly in poll() for a millisecond."""
    found = TracedThread.seize(target.workers[0])
    yield found
    found.detach(found.last_stop.signal)


def test_seized_stops_and_detached_continues(target: Counting) -> None:
    thread = TracedThread.seize(target.workers[0])
    assert thread.last_stop == Stop(StopKind.INTERRUPTED)
    count = target.counts()[thread.tid]
    target.advance(target.workers[1:])
    assert target.counts()[thread.tid] == count
    thread.detach()
    target.assert_untouched()


def test_resumed_runs_until_stopped(target: Counting, thread: TracedThread) -> None:
    thread.resume()
    target.advance((thread.tid,))
    assert thread.wait(0.0) is None
    assert thread.stop() == Stop(StopKind.INTERRUPTED)
    count = target.counts()[thread.tid]
    target.advance(target.workers[1:])
    assert target.counts()[thread.tid] == count


def _to_entry(thread: TracedThread) -> None:
    """Let the thread run until it is about to call poll(): its next call can be the end of an interrupted one."""
    while True:
        thread.resume_to_syscall()
        if thread.wait().kind is StopKind.SYSCALL_ENTRY and thread.registers().orig_rax == _POLL:
            return


def test_syscall_entry_and_exit_alternate(thread: TracedThread) -> None:
    _to_entry(thread)
    for _ in range(10):
        assert thread.last_stop == Stop(StopKind.SYSCALL_ENTRY)
        assert thread.registers().orig_rax == _POLL
        assert thread.registers().result == -errno.ENOSYS  # what the kernel puts there before the call
        thread.resume_to_syscall()
        assert thread.wait() == Stop(StopKind.SYSCALL_EXIT)
        assert (thread.registers().orig_rax, thread.registers().result) == (_POLL, 0)
        thread.resume_to_syscall()
        thread.wait()


def test_arguments_can_be_changed_at_the_entry(target: Counting, thread: TracedThread) -> None:
    _to_entry(thread)
    changed = thread.registers().copy()
    changed.rdx = 1 << 31  # a timeout without end
    thread.set_registers(changed)
    thread.resume()
    wait_until(lambda: target.states()[thread.tid] == "S", "the thread to wait")
    count = target.counts()[thread.tid]
    target.advance(target.workers[1:])
    assert target.counts()[thread.tid] == count
    assert thread.stop() == Stop(StopKind.INTERRUPTED)
    back = thread.registers()
    assert (back.orig_rax, back.rdx) == (_POLL, 1 << 31)
    assert back.is_in_interrupted_call
    back.rdx = 1
    thread.set_registers(back.with_full_timeout())


def test_a_signal_stop_can_be_delivered_or_suppressed(target: Counting, thread: TracedThread) -> None:
    for passed_on, taken in ((0, 0), (signal.SIGRTMIN, 1)):
        thread.resume()
        _signal_thread(target.pid, thread.tid, signal.SIGRTMIN)
        assert thread.wait() == Stop(StopKind.SIGNAL, signal.SIGRTMIN)
        assert not thread.is_stopped_by_fault()
        thread.resume(passed_on)
        target.advance((thread.tid,))
        assert target.signals == taken
        thread.stop()


def test_a_blocked_signal_waits_until_the_mask_is_changed(target: Counting, thread: TracedThread) -> None:
    mask = thread.signal_mask()
    assert mask == 0
    thread.set_signal_mask(1 << (signal.SIGRTMIN - 1))
    assert thread.signal_mask() == 1 << (signal.SIGRTMIN - 1)
    thread.resume()
    _signal_thread(target.pid, thread.tid, signal.SIGRTMIN)
    target.advance((thread.tid,))
    thread.stop()
    assert target.signals == 0
    thread.set_signal_mask(mask)
    thread.resume()
    assert thread.wait() == Stop(StopKind.SIGNAL, signal.SIGRTMIN)


def test_a_suppressed_signal_is_not_delivered_even_if_the_tracer_dies(target: Counting) -> None:
    for drop in (True, False):
        status = _in_a_process(lambda drop=drop: _die_at_a_signal(target, drop=drop))  # type: ignore[misc]
        assert os.WTERMSIG(status) == signal.SIGKILL
        target.assert_untouched()
        assert target.signals == (0 if drop else 1)


def _die_at_a_signal(target: Counting, *, drop: bool) -> None:
    thread = TracedThread.seize(target.workers[0])
    thread.resume()
    _signal_thread(target.pid, thread.tid, signal.SIGRTMIN)
    assert thread.wait() == Stop(StopKind.SIGNAL, signal.SIGRTMIN)
    if drop:
        thread.drop_signal()
    os.kill(os.getpid(), signal.SIGKILL)


def _in_a_process(act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def test_a_stopped_process_is_recognised(target: Counting, thread: TracedThread) -> None:
    thread.resume()
    os.kill(target.pid, signal.SIGSTOP)
    # each thread of a process can be the one to take the signal
    kinds = [thread.wait().kind]
    if thread.last_stop.kind is StopKind.SIGNAL:
        thread.resume(thread.last_stop.signal)
        kinds.append(thread.wait().kind)
    assert kinds[-1] is StopKind.GROUP_STOP
    os.kill(target.pid, signal.SIGCONT)


def test_the_end_of_a_thread_is_reported(target: Counting, thread: TracedThread) -> None:
    thread.resume()
    os.kill(target.pid, signal.SIGKILL)
    assert thread.wait() == Stop(StopKind.EXITED)
    for call in (thread.registers, thread.resume, thread.signal_mask, lambda: thread.read_memory(1 << 20, 1)):
        with pytest.raises(ProcessLookupError):
            call()
    thread.detach()
    assert target.child.reap() == -signal.SIGKILL


def test_the_end_of_a_main_thread_before_others_is_reported(start_counting: StartCounting) -> None:
    target = start_counting("main thread ends")
    wait_until(lambda: target.states()[target.pid] == "Z", "the main thread to end")
    with pytest.raises(PermissionError):
        TracedThread.seize(target.pid)
    target.assert_untouched()


def test_a_missing_or_traced_process_is_refused(target: Counting, thread: TracedThread) -> None:
    with pytest.raises(ProcessLookupError):
        TracedThread.seize(unused_pid())
    with tracer_of(target.workers[1]), pytest.raises(PermissionError, match=f"ptrace of thread {target.workers[1]}"):
        TracedThread.seize(target.workers[1])


def test_memory_reads_and_writes_succeed_or_raise(thread: TracedThread) -> None:
    address = thread.registers().rsp - 4096
    thread.write_memory(address, b"content")
    assert thread.read_memory(address, 7) == b"content"
    for nowhere in (4096, 1 << 63, (1 << 64) - 8):  # a register can hold anything
        with pytest.raises(OSError, match="memory of thread") as failure:
            thread.read_memory(nowhere, 8)
        assert failure.value.errno == errno.EFAULT
        with pytest.raises(OSError, match="memory of thread") as failure:
            thread.write_memory(nowhere, b"content")
        assert failure.value.errno == errno.EFAULT


_POLL = 7  # the system call of x86-64
