"""The transitions of a gang's threads: running, held, stopped, and back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from gpucr.errors import NotPermitted
from gpucr.gang.threads import GangThreads
from tests.children import tracer_of
from tests.counting import Counting, StartCounting

MakeThreads = Callable[..., GangThreads]


@pytest.fixture
def make_threads(start_counting: StartCounting) -> Iterator[MakeThreads]:
    """GangThreads that are let go at the end of the test, or the target could not be collected."""
    made: list[GangThreads] = []

    def make() -> GangThreads:
        made.append(GangThreads())
        return made[-1]

    yield make
    for threads in made:
        threads.release()


def test_held_stopped_held_again_released(target: Counting, make_threads: MakeThreads) -> None:
    free = target.workers[0]
    threads = make_threads()
    threads.hold({target.pid: free})
    assert threads.pids == (target.pid,)
    target.assert_only_this_runs(free)
    held_at = target.counts()

    threads.stop()
    assert threads.are_stopped
    target.wait_stopped()
    assert set(target.tracers().values()) == {0}

    threads.hold_again()
    assert not threads.are_stopped
    target.assert_only_this_runs(free)
    assert all(target.counts()[tid] == held_at[tid] for tid in target.workers[1:])

    threads.release()
    target.assert_untouched()


def test_holding_adds_processes_and_holds_none_twice(
    start_counting: StartCounting, target: Counting, make_threads: MakeThreads
) -> None:
    late = start_counting()
    threads = make_threads()
    threads.hold({target.pid: target.workers[0]})
    threads.hold({target.pid: target.workers[0], late.pid: late.workers[1]})
    assert threads.pids == (target.pid, late.pid)
    target.assert_only_this_runs(target.workers[0])
    late.assert_only_this_runs(late.workers[1])
    threads.stop()
    target.wait_stopped()
    late.wait_stopped()
    threads.hold_again()
    target.assert_only_this_runs(target.workers[0])
    late.assert_only_this_runs(late.workers[1])
    threads.release()
    target.assert_untouched()
    late.assert_untouched()


def test_continue_stopped_ends_a_pending_stop(target: Counting, make_threads: MakeThreads) -> None:
    os.kill(target.pid, signal.SIGSTOP)
    target.wait_stopped()
    threads = make_threads()
    threads.hold({target.pid: target.workers[3]})
    threads.continue_stopped()
    target.assert_only_this_runs(target.workers[3])
    threads.release()
    target.assert_untouched()


def test_an_ended_process_is_skipped(
    start_counting: StartCounting, target: Counting, make_threads: MakeThreads
) -> None:
    ends = start_counting()
    threads = make_threads()
    threads.hold({ends.pid: ends.workers[0], target.pid: target.workers[0]})
    os.kill(ends.pid, signal.SIGKILL)
    threads.release()
    ends.child.reap()
    threads.stop()
    target.wait_stopped()
    threads.hold_again()
    target.assert_only_this_runs(target.workers[0])
    threads.release()
    target.assert_untouched()


def test_another_tracer_is_named_as_the_reason(target: Counting, make_threads: MakeThreads) -> None:
    with tracer_of(target.workers[1]):
        threads = make_threads()
        with pytest.raises(NotPermitted, match=f"process {target.pid} cannot be traced") as failure:
            threads.hold({target.pid: target.workers[0]})
        assert failure.value.pid == target.pid
        assert failure.value.hint is not None
        assert "tracer" in failure.value.hint
        threads.release()
        target.advance(target.workers)
