"""The events that subscribers receive, and that subscribers cannot harm operations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import gpucr
from gpucr.errors import JobChanged, Unsupported
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.operation import Terms, all_or_nothing, operation
from gpucr.undo.steps import Meter, Phase


class Work:
    """A step that does what it is told to."""

    name = "work"

    def __init__(self, do: Callable[[], object] = lambda: None) -> None:
        self._do = do

    def describe(self) -> str:
        return "do it"

    def run(self, interrupts: Interrupts, meter: Meter) -> int:
        self._do()
        return 3

    def undo(self) -> None:
        """Nothing."""


@pytest.mark.parametrize("path", ["/proc/{ended}", "/proc/{ended}/ns/pid", "/proc/{ended}/task/7/comm"])
@pytest.mark.parametrize("kind", [FileNotFoundError, ProcessLookupError])
def test_a_process_that_ends_while_it_is_looked_at_is_reported(path: str, kind: type[OSError]) -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
    error = kind(0, "it is missing", path.format(ended=child.pid))
    with pytest.raises(JobChanged, match=f"process {child.pid} ended meanwhile") as told, operation("dump", 1):
        raise error
    assert (told.value.pids, told.value.__cause__) == ((child.pid,), error)


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError(2, "no", f"/proc/{os.getpid()}/ns/nosuch"), FileNotFoundError(2, "no", "/proc/sys/nosuch"),
     FileNotFoundError(2, "no", "/tmp"), FileNotFoundError(2, "no"), PermissionError(13, "no", "/proc/999999999/ns"),
     FileNotFoundError(2, "no", 7)],
)  # fmt: skip
def test_a_missing_file_for_another_reason_stays_that_error(error: OSError) -> None:
    with pytest.raises(type(error)) as told, operation("dump", 1):
        raise error
    assert told.value is error


def refuse() -> None:
    raise Unsupported("it cannot be", code="GPUCR-BUSY")


@pytest.fixture
def events() -> Iterator[list[gpucr.Event]]:
    heard: list[gpucr.Event] = []
    unsubscribe = gpucr.subscribe(heard.append)
    yield heard
    unsubscribe()


def told(events: list[gpucr.Event]) -> list[tuple[str, str | None]]:
    return [(each.kind, each.progress.event if each.progress is not None else each.code) for each in events]


def run(do: Callable[[], object] = lambda: None) -> tuple[Phase, ...]:
    with operation("dump", 4711) as running:
        return running.run([Work(do)])


def test_a_successful_operation(events: list[gpucr.Event]) -> None:
    run()
    assert told(events) == [("begin", None), ("progress", "begin"), ("progress", "end"), ("end", None)]
    assert {(each.operation, each.subject, each.id) for each in events} == {("dump", "4711", events[0].id)}
    assert [each.seconds for each in events] == sorted(each.seconds for each in events)
    assert events[2].progress is not None
    assert events[2].progress.size_bytes == 3


def test_a_failed_operation_reports_its_code(events: list[gpucr.Event]) -> None:
    with pytest.raises(Unsupported):
        run(refuse)
    assert told(events)[-2:] == [("progress", "undo"), ("fail", "GPUCR-BUSY")]
    assert isinstance(events[-1].error, Unsupported)


def test_a_foreign_error_has_no_code(events: list[gpucr.Event]) -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0)
    assert (events[-1].kind, events[-1].code, type(events[-1].error)) == ("fail", None, ZeroDivisionError)


def test_short_operations_are_reported_too(events: list[gpucr.Event]) -> None:
    with all_or_nothing("forget", "a") as interrupts:
        interrupts.conclude()
    assert told(events) == [("begin", None), ("end", None)]


def test_operations_have_distinct_ids(events: list[gpucr.Event]) -> None:
    run()
    run()
    assert len({each.id for each in events}) == 2


def test_an_ended_subscription_receives_nothing() -> None:
    heard: list[gpucr.Event] = []
    unsubscribe = gpucr.subscribe(heard.append)
    unsubscribe()
    unsubscribe()
    run()
    assert heard == []


def test_on_progress_and_subscribers_receive_the_same(events: list[gpucr.Event]) -> None:
    heard: list[gpucr.Progress] = []
    with operation("dump", 4711, Terms(on_progress=heard.append)) as running:
        running.run([Work()])
    assert heard == [each.progress for each in events if each.progress is not None]


def test_a_failing_subscriber_is_shown_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: shown.append(error))

    def fail(event: gpucr.Event) -> None:
        raise ValueError(event.kind)

    unsubscribe = gpucr.subscribe(fail)
    try:
        assert [phase.name for phase in run()] == ["work"]
    finally:
        unsubscribe()
    assert [str(error) for error in shown] == ["begin", "progress", "progress", "end"]
