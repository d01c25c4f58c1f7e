"""gpucr.operations.steps and interrupts: order, undo, deadlines, and real signals sent from inside a step."""

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
from gpucr.operations.interrupts import Interrupts
from gpucr.operations.steps import Phase, Progress, Step, WithoutUndo, run_steps

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

    def run(self, interrupts: Interrupts) -> int:
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
def test_a_failure_undoes_what_was_begun_in_reverse_with_the_failing_step_first(failing: int) -> None:
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


def test_an_undo_that_fails_is_told_with_both_messages_and_the_others_are_still_undone() -> None:
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


def test_errors_that_are_not_gpucrs_are_undone_too() -> None:
    log: list[str] = []
    with pytest.raises(ZeroDivisionError):
        run_steps([Recorded("a", log, raising(ZeroDivisionError()))])
    assert log == ["run a", "undo a"]


def test_exit_is_undone_too() -> None:
    log: list[str] = []
    with pytest.raises(SystemExit):
        run_steps([Recorded("a", log, raising(SystemExit(3)))])
    assert log == ["run a", "undo a"]


def test_without_undo_passes_everything_on_but_the_undo() -> None:
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


# --- deadlines -------------------------------------------------------------------------------------------------


def test_the_deadline_is_looked_at_between_steps() -> None:
    log: list[str] = []
    deadline = time.monotonic() + 0.02

    def until_it_is_over(_: Interrupts) -> None:
        while time.monotonic() <= deadline:
            threading.Event().wait(0.001)

    with pytest.raises(DeadlineExceeded, match="before: the step b"):
        run_steps([Recorded("a", log, until_it_is_over), Recorded("b", log)], deadline=deadline)
    assert log == ["run a", "undo a"]


def test_a_deadline_that_is_over_at_the_start_changes_nothing() -> None:
    log: list[str] = []
    with pytest.raises(DeadlineExceeded):
        run_steps([Recorded("a", log)], deadline=time.monotonic() - 1)
    assert log == []


def test_a_deadline_that_is_met() -> None:
    assert len(run_steps([Recorded("a", [])], deadline=time.monotonic() + 600)) == 1


# --- signals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("where", ["a", "b"])
def test_a_signal_lets_the_step_end_and_undoes_all(number: signal.Signals, where: str, outer: list[int]) -> None:
    log: list[str] = []

    def send_and_go_on(_: Interrupts) -> None:
        signal.raise_signal(number)
        log.append("went on")

    steps = [Recorded(name, log, send_and_go_on if name == where else None) for name in "ab"]
    with pytest.raises(Interrupted) as caught:
        run_steps(steps)
    begun = ["a"] if where == "a" else ["a", "b"]
    assert log == [*(f"run {name}" for name in begun), "went on", *(f"undo {name}" for name in reversed(begun))]
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


def test_a_signal_from_outside_wakes_a_blocking_wait() -> None:
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


def test_a_second_signal_does_not_cut_off_the_cleaning_up_after_the_first() -> None:
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


def test_what_is_postponed_is_acted_on_after_the_step() -> None:
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
def test_after_the_commit_a_signal_takes_nothing_back(*, signal_first: bool) -> None:
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


def test_after_an_allowed_wait_signals_are_noted_again() -> None:
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


def test_the_callers_handlers_get_what_comes_afterwards(outer: list[int]) -> None:
    run_steps([Recorded("a", [])])
    with pytest.raises(GpucrError):
        run_steps([Recorded("a", [], raising(GpucrError("no")))])
    for number in SIGNALS:
        signal.raise_signal(number)
    assert outer == list(SIGNALS)


@pytest.mark.parametrize("number", SIGNALS)
def test_what_the_caller_ignores_stays_ignored(number: signal.Signals) -> None:
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


def test_a_handler_that_is_not_pythons_is_left_alone(tmp_path: Path) -> None:
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
        "import signal; from gpucr.operations.steps import run_steps\n"
        "assert signal.getsignal(signal.SIGHUP) is None\n"
        "print(run_steps([])); signal.raise_signal(signal.SIGHUP); print('lives')"
    )
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("()\nlives\n", "")
