"""What subscribers are told of operations, and that they cannot harm them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

import gpucr
from gpucr.errors import Unsupported
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.operation import all_or_nothing, operation
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


def test_an_operation_that_succeeds(events: list[gpucr.Event]) -> None:
    run()
    assert told(events) == [("begin", None), ("progress", "begin"), ("progress", "end"), ("end", None)]
    assert {(each.operation, each.subject, each.id) for each in events} == {("dump", "4711", events[0].id)}
    assert [each.seconds for each in events] == sorted(each.seconds for each in events)
    assert events[2].progress is not None
    assert events[2].progress.size_bytes == 3


def test_one_that_fails_says_its_code(events: list[gpucr.Event]) -> None:
    with pytest.raises(Unsupported):
        run(refuse)
    assert told(events)[-2:] == [("progress", "undo"), ("fail", "GPUCR-BUSY")]
    assert isinstance(events[-1].error, Unsupported)


def test_an_error_that_is_not_ours_has_no_code(events: list[gpucr.Event]) -> None:
    with pytest.raises(ZeroDivisionError):
        run(lambda: 1 / 0)
    assert (events[-1].kind, events[-1].code, type(events[-1].error)) == ("fail", None, ZeroDivisionError)


def test_short_ones_are_told_of_as_well(events: list[gpucr.Event]) -> None:
    with all_or_nothing("forget", "a") as interrupts:
        interrupts.conclude()
    assert told(events) == [("begin", None), ("end", None)]


def test_operations_are_told_apart(events: list[gpucr.Event]) -> None:
    run()
    run()
    assert len({each.id for each in events}) == 2


def test_who_has_ended_the_subscription_hears_nothing() -> None:
    heard: list[gpucr.Event] = []
    unsubscribe = gpucr.subscribe(heard.append)
    unsubscribe()
    unsubscribe()
    run()
    assert heard == []


def test_on_progress_and_subscribers_hear_the_same(events: list[gpucr.Event]) -> None:
    heard: list[gpucr.Progress] = []
    with operation("dump", 4711, on_progress=heard.append) as running:
        running.run([Work()])
    assert heard == [each.progress for each in events if each.progress is not None]


def test_a_subscriber_that_fails_is_shown_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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
