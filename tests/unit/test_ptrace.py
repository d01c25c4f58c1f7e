"""Holding threads: which ones run, and that nothing is lost when they are let go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

import pytest

from gpucr.linux import processes
from gpucr.linux.ptrace import HeldThreads
from tests.counter import wait_until
from tests.unit.children import tracer_of
from tests.unit.counting import Counting, Start

Hold = Callable[[Mapping[int, int]], HeldThreads]


@pytest.fixture
def hold(start: Start) -> Iterator[Hold]:
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


def test_all_threads_but_one_stand_still_until_the_release(target: Counting, hold: Hold) -> None:
    free = target.workers[1]
    held = hold({target.pid: free})
    target.assert_only_this_runs(free)
    assert [tid for tid, tracer in target.tracers().items() if tracer == 0] == [free]
    held.release()
    target.assert_untouched()


def test_several_processes_are_held_together(start: Start, target: Counting, hold: Hold) -> None:
    other = start()
    held = hold({target.pid: target.workers[0], other.pid: other.workers[3]})
    target.assert_only_this_runs(target.workers[0])
    other.assert_only_this_runs(other.workers[3])
    held.release()
    target.assert_untouched()
    other.assert_untouched()


def test_releasing_what_is_not_held_does_nothing(target: Counting) -> None:
    held = HeldThreads({target.pid: target.workers[0]})
    held.release()
    held.hold()
    held.release()
    held.release()
    target.assert_untouched()


def test_no_signal_is_lost(start: Start, hold: Hold) -> None:
    target = start("flood")
    for _ in range(50):
        wait_until(lambda: target.signals > 0, "the flood of signals")
        hold({target.pid: target.workers[0]}).release()
    target.end_flood()
    # real-time signals queue up, so each one that is dropped shows
    wait_until(lambda: target.signals == target.sent, "every signal to be taken", timeout_s=10)


def test_a_signal_for_a_held_thread_is_taken_after_the_release(target: Counting, hold: Hold) -> None:
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


def test_threads_that_start_and_end_meanwhile_are_caught_or_passed_over(start: Start, hold: Hold) -> None:
    target = start("spawning")
    wait_until(lambda: target.spawned > 0, "the first thread to be spawned")
    for _ in range(20):
        held = hold({target.pid: target.workers[0]})
        threads, spawned = processes.threads(target.pid), target.spawned
        target.assert_only_this_runs(target.workers[0])
        assert (processes.threads(target.pid), target.spawned) == (threads, spawned)
        held.release()
        _wait_for_more(target, spawned)


def test_a_main_thread_that_has_ended_is_passed_over(start: Start, hold: Hold) -> None:
    target = start("main thread ends")
    wait_until(lambda: target.states()[target.pid] == "Z", "the main thread to end")
    held = hold({target.pid: target.workers[0]})
    target.assert_only_this_runs(target.workers[0])
    held.release()
    target.assert_untouched()


def test_a_process_that_is_killed_while_held_can_be_collected(target: Counting, hold: Hold) -> None:
    held = hold({target.pid: target.workers[0]})
    os.kill(target.pid, signal.SIGKILL)
    held.release()
    assert target.child.reap() == -signal.SIGKILL


def test_a_process_that_is_gone_is_passed_over(start: Start, hold: Hold) -> None:
    target = start()
    target.child.close()
    held = hold({target.pid: target.workers[0]})
    held.release()


def test_threads_go_on_when_their_holder_is_killed(target: Counting) -> None:
    source = (
        "import sys, signal; from gpucr.linux.ptrace import HeldThreads\n"
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


def test_what_somebody_else_traces_is_refused_and_nothing_stays_held(target: Counting) -> None:
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
