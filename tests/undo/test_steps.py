"""gpucr.undo.steps and interrupts: order, undo, deadlines, and real signals sent from inside a step."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gpucr.errors import DeadlineExceeded, DriverError, GpucrError, Interrupted, JobDamaged
from gpucr.undo import steps as steps_module
from gpucr.undo.events import Progress
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.steps import LeftBehind, Meter, Phase, Step, WithoutUndo
from tests.undo.alone import run_steps

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Action = Callable[[Interrupts], None]


class Recorded:
    """A step that writes down what is done with it."""

    def __init__(
        self, name: str, log: list[str], run: Action | None = None, undo: Callable[[], None] | None = None
    ) -> None:
        self.name = name
        self._log, self._run, self._undo = log, run, undo

    def describe(self) -> str:
        return f"the step {self.name}"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        self._log.append(f"run {self.name}")
        if self._run is not None:
            self._run(interrupts)
        return len(self._log)

    def undo(self) -> None:
        self._log.append(f"undo {self.name}")
        if self._undo is not None:
            self._undo()


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def sending(number: signal.Signals) -> Callable[..., None]:
    """Sends this process a signal; its handler has run when the call returns."""

    def send(*_: object) -> None:
        signal.raise_signal(number)

    return send


@pytest.fixture(autouse=True)
def outer() -> Iterator[list[int]]:
    """Handlers that stand for the caller's, so that a signal that slips through is seen and does not end pytest."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    yield seen
    now = [signal.getsignal(number) for number in SIGNALS]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert now == [note] * 3, "the caller's handlers were not put back"


# --- order and undo --------------------------------------------------------------------------------------------


def test_steps_run_in_order_and_report_what_they_moved() -> None:
    log: list[str] = []
    events: list[Progress] = []
    phases = run_steps([Recorded("a", log), Recorded("b", log)], on_progress=events.append)
    assert log == ["run a", "run b"]
    assert [(phase.name, phase.size_bytes) for phase in phases] == [("a", 1), ("b", 2)]
    assert all(isinstance(phase, Phase) and phase.seconds >= 0 for phase in phases)
    assert [(event.event, event.phase, event.size_bytes) for event in events] == [
        ("begin", "a", 0), ("end", "a", 1), ("begin", "b", 0), ("end", "b", 2),
    ]  # fmt: skip
    assert events[0].description == "the step a"


def test_no_steps() -> None:
    assert run_steps([]) == ()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_undoes_started_steps_in_reverse_from_the_failing_one(failing: int) -> None:
    log: list[str] = []
    error = DriverError("no", pid=1, action="lock", result=999)
    steps = [Recorded(name, log, raising(error) if i == failing else None) for i, name in enumerate("abc")]
    events: list[Progress] = []
    with pytest.raises(DriverError) as caught:
        run_steps(steps, on_progress=events.append)
    assert caught.value is error
    begun = "abc"[: failing + 1]
    assert log == [f"run {name}" for name in begun] + [f"undo {name}" for name in reversed(begun)]
    assert [event.phase for event in events if event.event == "undo"] == list(reversed(begun))


def test_a_failed_undo_is_reported_with_both_messages_and_the_rest_is_undone() -> None:
    log: list[str] = []
    cause = GpucrError("the checkpoint went wrong")
    steps = [
        Recorded("a", log, undo=raising(OSError("no space"))),
        Recorded("b", log),
        Recorded("c", log, raising(cause), raising(GpucrError("unlock went wrong"))),
    ]
    with pytest.raises(JobDamaged) as caught:
        run_steps(steps)
    assert log[-3:] == ["undo c", "undo b", "undo a"]
    assert caught.value.failures == ("c: unlock went wrong", "a: no space")
    assert caught.value.message == (
        "the checkpoint went wrong; and it could not be undone: c: unlock went wrong; a: no space"
    )
    assert caught.value.__cause__ is cause
    assert caught.value.exit_code == 10


def test_leftovers_of_an_undo_are_reported_and_are_not_damage() -> None:
    log: list[str] = []
    first = Recorded("first", log, undo=raising(LeftBehind("/x could not be removed: Input/output error")))
    failing = Recorded("failing", log, run=raising(GpucrError("it failed", hint="try again")))
    with pytest.raises(GpucrError, match="it failed") as caught:
        run_steps([first, failing])
    assert (caught.value.exit_code, caught.value.hint) == (
        1,
        "try again; /x could not be removed: Input/output error",
    )
    interrupted = Recorded("interrupted", log, run=raising(KeyboardInterrupt()))
    with pytest.raises(Interrupted) as stopped:
        run_steps([first, interrupted])
    assert stopped.value.hint == "/x could not be removed: Input/output error"


def test_foreign_errors_are_undone_too() -> None:
    log: list[str] = []
    with pytest.raises(ZeroDivisionError):
        run_steps([Recorded("a", log, raising(ZeroDivisionError()))])
    assert log == ["run a", "undo a"]


def test_sys_exit_is_undone_too() -> None:
    log: list[str] = []
    with pytest.raises(SystemExit):
        run_steps([Recorded("a", log, raising(SystemExit(3)))])
    assert log == ["run a", "undo a"]


def test_without_undo_delegates_everything_but_undo() -> None:
    log: list[str] = []
    step: Step = WithoutUndo(Recorded("a", log))
    assert (step.name, step.describe()) == ("a", "the step a")
    with pytest.raises(ZeroDivisionError):
        run_steps([step, Recorded("b", log, raising(ZeroDivisionError()))])
    assert log == ["run a", "run b", "undo b"]


def test_a_listener_that_fails_ends_the_operation_but_not_its_undo() -> None:
    log: list[str] = []

    def listen(progress: Progress) -> None:
        if progress.phase == "b":
            raise BrokenPipeError("the terminal is gone")

    with pytest.raises(BrokenPipeError):
        run_steps([Recorded("a", log), Recorded("b", log)], on_progress=listen)
    assert log == ["run a", "undo b", "undo a"]


def test_a_listener_that_exits_the_program_does_not_cut_an_undo_short() -> None:
    log: list[str] = []

    def listen(progress: Progress) -> None:
        if progress.event == "undo":
            raise SystemExit(3)

    with pytest.raises(GpucrError, match=r"^no$"):
        run_steps([Recorded("a", log), Recorded("b", log, raising(GpucrError("no")))], on_progress=listen)
    assert log[-2:] == ["undo b", "undo a"]


# --- how far a step is ------------------------------------------------------------------------------------------


class Metered:
    """A step that does with its meter what it is told to."""

    name = "save"

    def __init__(self, work: Callable[[Meter, Interrupts], None], log: list[str] | None = None) -> None:
        self._work = work
        self._log = log if log is not None else []

    def describe(self) -> str:
        return "save it"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        self._work(meter, interrupts)
        self._log.append("worked")
        return 0

    def undo(self) -> None:
        self._log.append("undone")


class Listener:
    """Takes events down, and fails the test where two come at once; ``fail_on`` raises at that event."""

    def __init__(self, fail_on: str | None = None) -> None:
        self.events: list[Progress] = []
        self.heard = threading.Event()
        self._fail_on = fail_on
        self._turn = threading.Lock()

    def __call__(self, progress: Progress) -> None:
        assert self._turn.acquire(blocking=False), "called by two threads at once"
        try:
            self.events.append(progress)
            if progress.event == self._fail_on:
                self.heard.set()
                raise BrokenPipeError(f"the listener is gone at {progress.event}")
        finally:
            self._turn.release()

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(event.event, event.description) for event in self.events]

    def advances(self) -> list[Progress]:
        return [event for event in self.events if event.event == "advance"]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events as fast as they come."""
    monkeypatch.setattr(steps_module, "REPORT_INTERVAL_S", 0.0001)


def wait_for_progress(interrupts: Interrupts, meter: Meter) -> None:
    """A step's loop: ends only through `check`."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        meter.add(1)
        interrupts.check()


def test_a_meter_sums_over_threads(often: None) -> None:
    listener = Listener()

    def work(meter: Meter, _: Interrupts) -> None:
        meter.expect(4000)

        def add() -> None:
            for _ in range(1000):
                meter.add(1)

        threads = [threading.Thread(target=add) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run_steps([Metered(work)], on_progress=listener)
    assert (listener.events[0].event, listener.events[-1].event) == ("begin", "end")
    advances = listener.advances()
    assert listener.events[1:-1] == advances
    assert [e.size_bytes for e in advances] == sorted(e.size_bytes for e in advances)
    assert [e.seconds for e in advances] == sorted(e.seconds for e in advances)
    last = advances[-1]
    assert (last.phase, last.description, last.size_bytes, last.total_bytes) == ("save", "save it", 4000, 4000)
    assert not [thread for thread in threading.enumerate() if "progress" in thread.name]


def test_advances_arrive_while_the_step_works(often: None) -> None:
    listener = Listener()

    def work(meter: Meter, _: Interrupts) -> None:
        meter.expect(100)
        meter.set(7)
        deadline = time.monotonic() + 60
        while not any(e.size_bytes == 7 for e in listener.advances()) and time.monotonic() < deadline:
            threading.Event().wait(0.001)
        meter.set(50)
        meter.expect(80)

    run_steps([Metered(work)], on_progress=listener)
    seen = [(e.size_bytes, e.total_bytes) for e in listener.advances()]
    assert (7, 100) in seen
    assert seen[-1] == (50, 80)


def test_advances_are_ten_a_second_at_most() -> None:
    listener = Listener()

    def work(meter: Meter, _: Interrupts) -> None:
        meter.expect(1)
        while meter.seconds < 0.25:
            meter.add(1)

    (phase,) = run_steps([Metered(work)], on_progress=listener)
    assert 1 <= len(listener.advances()) <= phase.seconds / 0.1 + 1


def test_a_step_that_moves_nothing_does_not_advance(often: None) -> None:
    listener = Listener()
    run_steps([Metered(lambda meter, _: meter.add(0))], on_progress=listener)
    assert [event.event for event in listener.events] == ["begin", "end"]


def test_a_step_that_does_not_know_its_total_advances_without_one(often: None) -> None:
    listener = Listener()
    run_steps([Metered(lambda meter, _: meter.add(5))], on_progress=listener)
    assert {(each.size_bytes, each.total_bytes) for each in listener.events if each.event == "advance"} == {(5, 0)}


def test_notes_arrive_in_order_between_begin_and_end() -> None:
    listener = Listener()

    def work(meter: Meter, _: Interrupts) -> None:
        for text in ("first", "second"):
            meter.note(text)

    run_steps([Metered(work)], on_progress=listener)
    assert listener.said == [("begin", "save it"), ("note", "first"), ("note", "second"), ("end", "save it")]


def test_a_failing_step_reports_its_progress_before_the_undo() -> None:
    listener = Listener()

    def work(meter: Meter, _: Interrupts) -> None:
        meter.expect(10)
        meter.add(3)
        meter.note("the disk is slow")
        raise GpucrError("no")

    with pytest.raises(GpucrError, match=r"^no$"):
        run_steps([Metered(work)], on_progress=listener)
    assert [event.event for event in listener.events] == ["begin", "note", "advance", "undo"]
    assert listener.advances()[0].size_bytes == 3


def test_a_meter_works_without_a_listener() -> None:
    log: list[str] = []

    def work(meter: Meter, _: Interrupts) -> None:
        meter.expect(1)
        meter.add(1)
        meter.note("nobody hears it")

    run_steps([Metered(work, log)])
    assert log == ["worked"]


@pytest.mark.parametrize("event", ["advance", "note"])
def test_a_listener_failure_ends_an_interruptible_step(event: str, often: None) -> None:
    log: list[str] = []
    listener = Listener(fail_on=event)

    def work(meter: Meter, interrupts: Interrupts) -> None:
        meter.expect(1)
        meter.note("it begins")
        assert listener.heard.wait(60)
        meter.add(1)  # what is told to the meter fails nobody
        log.append("not cut off")
        wait_for_progress(interrupts, meter)

    with pytest.raises(BrokenPipeError, match=f"gone at {event}"):
        run_steps([Recorded("a", log), Metered(work, log)], on_progress=listener)
    assert log == ["run a", "not cut off", "undone", "undo a"]


def test_a_listener_that_fails_at_the_last_advance_ends_the_operation() -> None:
    log: list[str] = []
    steps: list[Step] = [Metered(lambda meter, _: meter.expect(1), log), Recorded("b", log)]
    with pytest.raises(BrokenPipeError, match="gone at advance"):
        run_steps(steps, on_progress=Listener(fail_on="advance"))
    assert log == ["worked", "undone"]


def test_a_listener_failure_does_not_replace_the_steps_own_error(often: None) -> None:
    listener = Listener(fail_on="advance")

    def work(meter: Meter, _: Interrupts) -> None:
        meter.expect(1)
        assert listener.heard.wait(60)
        raise GpucrError("no")

    with pytest.raises(GpucrError, match=r"^no$"):
        run_steps([Metered(work)], on_progress=listener)


def test_after_the_commit_a_listener_failure_undoes_nothing() -> None:
    log: list[str] = []

    def work(meter: Meter, interrupts: Interrupts) -> None:
        meter.expect(1)
        interrupts.commit()

    run_steps([Metered(work, log), Recorded("b", log)], on_progress=Listener(fail_on="advance"))
    assert log == ["worked", "run b"]


def test_a_signal_ends_a_wait_with_a_meter_and_leaves_no_thread() -> None:
    log: list[str] = []

    def work(meter: Meter, interrupts: Interrupts) -> None:
        meter.expect(1)
        with interrupts.allowed():
            signal.raise_signal(signal.SIGINT)

    listener = Listener()
    with pytest.raises(Interrupted):
        run_steps([Metered(work, log)], on_progress=listener)
    assert log == ["undone"]
    assert [event.event for event in listener.events] == ["begin", "advance", "undo"]
    assert not [thread for thread in threading.enumerate() if "progress" in thread.name]


def test_without_undo_delegates_the_meter() -> None:
    listener = Listener()
    run_steps([WithoutUndo(Metered(lambda meter, _: meter.note("here")))], on_progress=listener)
    assert ("note", "here") in listener.said


@pytest.mark.parametrize(
    ("seconds", "size_bytes", "total_bytes", "rate", "eta_s"),
    [
        (0.0, 0, 0, None, None),
        (2.0, 0, 100, None, None),
        (0.0, 50, 100, None, None),
        (2.0, 50, 0, 25.0, None),
        (2.0, 50, 100, 25.0, 2.0),
        (2.0, 100, 100, 50.0, 0.0),
        (2.0, 120, 100, 60.0, 0.0),
    ],
)
def test_rate_and_time_left(
    seconds: float, size_bytes: int, total_bytes: int, rate: float | None, eta_s: float | None
) -> None:
    progress = Progress("advance", "save", "", seconds, size_bytes, total_bytes)
    assert (progress.rate_bytes_per_s, progress.eta_s) == (rate, eta_s)


# --- deadlines -------------------------------------------------------------------------------------------------


def test_the_deadline_is_checked_between_steps() -> None:
    log: list[str] = []
    deadline = time.monotonic() + 0.5

    def until_it_is_over(_: Interrupts) -> None:
        while time.monotonic() <= deadline:
            threading.Event().wait(0.001)

    with pytest.raises(DeadlineExceeded, match="before: the step b"):
        run_steps([Recorded("a", log, until_it_is_over), Recorded("b", log)], deadline=deadline)
    assert log == ["run a", "undo a"]


def test_an_expired_deadline_changes_nothing() -> None:
    log: list[str] = []
    with pytest.raises(DeadlineExceeded):
        run_steps([Recorded("a", log)], deadline=time.monotonic() - 1)
    assert log == []


def test_a_deadline_that_is_met() -> None:
    assert len(run_steps([Recorded("a", [])], deadline=time.monotonic() + 600)) == 1


# --- signals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("where", ["a", "b"])
def test_a_signal_lets_the_step_finish_and_undoes_everything(
    number: signal.Signals, where: str, outer: list[int]
) -> None:
    log: list[str] = []

    def send_and_go_on(_: Interrupts) -> None:
        signal.raise_signal(number)
        log.append("continued")

    steps = [Recorded(name, log, send_and_go_on if name == where else None) for name in "ab"]
    with pytest.raises(Interrupted) as caught:
        run_steps(steps)
    begun = ["a"] if where == "a" else ["a", "b"]
    assert log == [*(f"run {name}" for name in begun), "continued", *(f"undo {name}" for name in reversed(begun))]
    assert caught.value.exit_code == 130
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert outer == []


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_cuts_an_allowed_wait_short(number: signal.Signals) -> None:
    log: list[str] = []

    def wait(interrupts: Interrupts) -> None:
        with interrupts.allowed():
            signal.raise_signal(number)
            log.append("waited on")

    with pytest.raises(Interrupted):
        run_steps([Recorded("a", log, wait)])
    assert log == ["run a", "undo a"]


def test_an_external_signal_wakes_a_blocking_wait() -> None:
    read_end, write_end = os.pipe()

    def wait(interrupts: Interrupts) -> None:
        with interrupts.allowed():
            subprocess.Popen([sys.executable, "-c", f"import os; os.kill({os.getpid()}, 15)"]).wait()
            os.read(read_end, 1)

    try:
        with pytest.raises(Interrupted):
            run_steps([Recorded("a", [], wait)])
    finally:
        os.close(read_end)
        os.close(write_end)


def test_a_signal_before_an_allowed_wait_is_not_lost() -> None:
    log: list[str] = []

    def wait(interrupts: Interrupts) -> None:
        signal.raise_signal(signal.SIGINT)
        with interrupts.allowed():
            log.append("waited")

    with pytest.raises(Interrupted):
        run_steps([Recorded("a", log, wait)])
    assert log == ["run a", "undo a"]


def test_a_second_signal_does_not_interrupt_the_cleanup() -> None:
    log: list[str] = []

    def wait(interrupts: Interrupts) -> None:
        with interrupts.allowed():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)
                log.append("cleaned up")

    with pytest.raises(Interrupted):
        run_steps([Recorded("a", log, wait)])
    assert log == ["run a", "cleaned up", "undo a"]


def test_a_postponed_signal_is_handled_after_the_step() -> None:
    log: list[str] = []

    def wait(interrupts: Interrupts) -> None:
        with interrupts.allowed():
            interrupts.postpone()
            signal.raise_signal(signal.SIGINT)
            log.append("held")

    with pytest.raises(Interrupted):
        run_steps([Recorded("a", log, wait)])
    assert log == ["run a", "held", "undo a"]


@pytest.mark.parametrize("signal_first", [True, False])
def test_after_the_commit_a_signal_undoes_nothing(*, signal_first: bool) -> None:
    log: list[str] = []

    def commit(interrupts: Interrupts) -> None:
        with interrupts.allowed():
            interrupts.postpone()
            if signal_first:
                signal.raise_signal(signal.SIGINT)
            interrupts.commit()
            if not signal_first:
                signal.raise_signal(signal.SIGINT)

    assert [phase.name for phase in run_steps([Recorded("a", log, commit), Recorded("b", log)])] == ["a", "b"]
    assert log == ["run a", "run b"]


def test_after_an_allowed_wait_signals_are_deferred_again() -> None:
    log: list[str] = []

    def wait_then_work(interrupts: Interrupts) -> None:
        with interrupts.allowed():
            pass
        signal.raise_signal(signal.SIGINT)
        log.append("worked on")

    with pytest.raises(Interrupted):
        run_steps([Recorded("a", log, wait_then_work)])
    assert log == ["run a", "worked on", "undo a"]


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_during_the_undo_are_reported_and_change_nothing(number: signal.Signals, outer: list[int]) -> None:
    log: list[str] = []
    events: list[Progress] = []
    steps = [Recorded("a", log, undo=sending(number)), Recorded("b", log, sending(signal.SIGINT), sending(number))]
    with pytest.raises(Interrupted):
        run_steps(steps, on_progress=events.append)
    assert log == ["run a", "run b", "undo b", "undo a"]
    assert [event.event for event in events if event.event in ("undo", "signal-ignored")] == [
        "undo", "signal-ignored", "undo", "signal-ignored",
    ]  # fmt: skip
    assert "cannot be cut short" in next(e.description for e in events if e.event == "signal-ignored")
    assert outer == []


def test_a_signal_during_the_listener_is_reported_afterwards() -> None:
    """A second Ctrl-C often comes while the line about the undo is written, inside which no other can be."""
    done: list[str] = []
    is_at_work = False

    def listen(progress: Progress) -> None:
        nonlocal is_at_work
        if is_at_work:
            raise RuntimeError("reentrant call")
        is_at_work = True
        if progress.event == "undo":
            signal.raise_signal(signal.SIGINT)
        is_at_work = False
        done.append(progress.event)

    with pytest.raises(GpucrError, match=r"^no$"):
        run_steps([Recorded("a", []), Recorded("b", [], raising(GpucrError("no")))], on_progress=listen)
    assert done[-4:] == ["undo", "signal-ignored", "undo", "signal-ignored"]


def test_a_signal_during_the_undo_does_not_replace_the_error() -> None:
    error = GpucrError("the reason")
    with pytest.raises(GpucrError) as caught:
        run_steps([Recorded("a", [], raising(error), sending(signal.SIGTERM))])
    assert caught.value is error


def test_a_listener_that_fails_on_an_ignored_signal_does_not_stop_the_undo() -> None:
    log: list[str] = []

    def listen(progress: Progress) -> None:
        if progress.event == "signal-ignored":
            raise BrokenPipeError

    steps = [Recorded("a", log), Recorded("b", log, raising(GpucrError("no")), sending(signal.SIGINT))]
    with pytest.raises(GpucrError, match=r"^no$"):
        run_steps(steps, on_progress=listen)
    assert log[-2:] == ["undo b", "undo a"]


def test_later_signals_go_to_the_callers_handlers(outer: list[int]) -> None:
    run_steps([Recorded("a", [])])
    with pytest.raises(GpucrError):
        run_steps([Recorded("a", [], raising(GpucrError("no")))])
    for number in SIGNALS:
        signal.raise_signal(number)
    assert outer == list(SIGNALS)


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_the_caller_ignores_stay_ignored(number: signal.Signals) -> None:
    callers = signal.signal(number, signal.SIG_IGN)
    try:
        log: list[str] = []
        run_steps([Recorded("a", log, sending(number)), Recorded("b", log)])
        assert log == ["run a", "run b"]
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, callers)


def test_another_thread_runs_steps_without_touching_signals(outer: list[int]) -> None:
    log: list[str] = []
    results: list[Any] = []

    def work() -> None:
        failing: Sequence[Step] = [Recorded("b", log, raising(GpucrError("no")))]
        results.append(run_steps([Recorded("a", log, sending(signal.SIGINT))]))
        try:
            run_steps(failing)
        except GpucrError as error:
            results.append(error.message)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert log == ["run a", "run b", "undo b"]
    assert [phase.name for phase in results[0]] == ["a"]
    assert results[1] == "no"
    assert outer == [signal.SIGINT]


def test_a_non_python_handler_is_left_alone(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for a handler that is not Python's")
    source, library = tmp_path / "handler.c", tmp_path / "handler.so"
    source.write_text(
        "#include <signal.h>\nstatic void note(int number) { (void)number; }\n"
        "__attribute__((constructor)) static void install(void) { signal(SIGHUP, note); }\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    code = (
        "import signal; from tests.undo.alone import run_steps\n"
        "assert signal.getsignal(signal.SIGHUP) is None\n"
        "print(run_steps([])); signal.raise_signal(signal.SIGHUP); print('lives')"
    )
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("()\nlives\n", "")
