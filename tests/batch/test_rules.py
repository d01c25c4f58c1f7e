"""What the nodes of a job do next, by what they have told."""

from __future__ import annotations

from typing import Any

import pytest

from gpucr.batch.rules import PAUSE_S, News, Order, Rules, cut
from gpucr.records import decode, encode


class Job:
    """The rules of a job, at a time that the test sets."""

    def __init__(self, count: int = 2, **options: Any) -> None:
        given: dict[str, Any] = {"every_s": 60.0, "grace_s": 30.0, "checkpoint_exit": None, "requeue_exit": 99}
        self.rules = Rules(count, **{**given, **options}, next_start=lambda: "it starts over")
        self.now_s = 1000.0

    def tell(self, node: int, kind: Any, number: int = 0, text: str = "") -> None:
        self.rules.take(node, News(kind, number, text), self.now_s)

    def orders(self, after_s: float = 0) -> list[Order]:
        self.now_s += after_s
        return list(self.rules.decide(self.now_s))

    def kinds(self, after_s: float = 0) -> list[str]:
        return [each.kind for each in self.orders(after_s)]


def running(count: int = 2, **options: Any) -> Job:
    """All parts run."""
    job = Job(count, **options)
    for node in range(count):
        job.tell(node, "runs")
    assert job.orders() == []
    return job


def test_a_set_every_minute() -> None:
    job = running()
    assert job.orders(59) == []
    (order,) = job.orders(1)
    assert (order.kind, order.number, order.leave_running, order.limit_s) == ("dump", 1, True, None)
    job.tell(1, "dumped", 1)
    assert job.orders(70) == [], "node 0 is not ready"
    job.tell(0, "dumped", 1)
    assert job.kinds() == ["made"]
    assert job.orders(59) == [], "the next one is due a minute after the end of this"
    assert job.orders(1)[0].number == 2
    job.tell(0, "failed", 2)
    job.tell(1, "failed", 2)
    assert job.orders() == []


def test_no_set_before_all_run() -> None:
    job = Job()
    job.tell(0, "runs")
    assert job.orders(1000) == []
    job.tell(1, "leave", 1, "SIGURG")
    assert job.orders() == []
    job.tell(1, "runs")
    assert job.kinds() == ["dump"]


def test_a_signal_on_one_node_is_one_for_all() -> None:
    job = running()
    job.tell(1, "leave", 1, "SIGURG")
    job.tell(0, "leave", 1, "SIGTERM")
    (order,) = job.orders(2)
    assert (order.text, order.leave_running, order.limit_s) == ("SIGURG", False, 28)
    job.tell(0, "dumped", 1)
    job.tell(1, "dumped", 1)
    assert job.orders() == [Order("made"), Order("over", 99)]


def test_a_set_that_leaves_the_job_running_makes_way() -> None:
    job = running()
    job.orders(60)
    job.tell(0, "leave", 0, "the time limit is near")
    assert job.orders() == [Order("stop", 1, "the time limit is near")]
    assert job.orders() == [], "once"
    job.tell(0, "failed", 1)
    assert job.orders() == [], "node 1 still undoes it"
    job.tell(1, "failed", 1)
    assert job.orders() == []
    (order,) = job.orders()
    assert (order.number, order.leave_running) == (2, False)


def test_attempts_until_the_grace_is_over() -> None:
    job = running()
    job.tell(0, "leave", 1, "SIGURG")
    for number in (1, 2):
        assert job.orders(PAUSE_S)[0].number == number
        job.tell(0, "failed", number)
        job.tell(1, "failed", number)
        assert job.orders() == []
    assert job.orders(30) == [Order("over", 99, "the job could not be dumped in time, and is ended: it starts over")]


def test_a_set_that_one_node_knows_to_be_complete_is() -> None:
    job = running()
    job.tell(0, "leave", 1, "SIGURG")
    job.orders()
    job.tell(0, "failed", 1)
    job.tell(1, "dumped", 1)
    assert job.kinds() == ["made", "over"], "the part of node 0, which runs, is ended"


def test_parts_that_end_one_after_the_other() -> None:
    job = running()
    job.tell(1, "ended", 0)
    assert job.orders(1000) == [], "there are no sets without it"
    job.tell(0, "ended", 0)
    assert job.orders() == [Order("over", 0, by_itself=True)]


def test_a_signal_when_a_part_has_ended() -> None:
    job = running()
    job.tell(1, "ended", 0)
    job.tell(0, "leave", 1, "SIGURG")
    assert job.orders(29) == [], "the other part may end, too"
    late = running()
    late.tell(1, "ended", 0)
    late.tell(0, "leave", 1, "SIGURG")
    assert late.kinds(30) == ["over"]
    job.tell(0, "ended", 0)
    assert job.orders() == [Order("over", 0, "SIGURG", by_itself=True)]


def test_a_part_that_fails_gives_the_others_a_moment() -> None:
    job = running(3)
    job.tell(2, "ended", 7)
    assert job.orders(29) == []
    job.tell(0, "ended", 1)
    assert job.orders(0.5) == []
    assert job.orders(0.5) == [Order("over", 7, by_itself=True)], "with the code of the first that has failed"


def test_one_node_ends_it_for_all() -> None:
    job = running()
    job.tell(1, "over", 3, "there is no GPU here")
    job.tell(0, "over", 5, "later")
    assert job.orders() == [Order("over", 3, "node 1: there is no GPU here")]
    job = running()
    job.orders(60)
    job.rules.requeue("node 1 is gone")
    assert job.orders() == [Order("over", 99, "node 1 is gone: it starts over")], "also in the middle of a set"


@pytest.mark.parametrize("character", ["x", "\0", "\udc80", '"', "\u00e9", "\U0001f600"])
def test_any_text_fits_into_a_message(character: str) -> None:
    job = running()
    job.tell(1, "over", 3, cut(character * 5000))
    (order,) = job.orders()
    text = encode(order).decode()
    assert len(text) <= 2000
    assert decode(text, Order) == order


def test_a_code_for_checkpoints_ends_the_job() -> None:
    job = running(1, checkpoint_exit=85)
    assert job.orders(60)[0].leave_running is False
    job.tell(0, "dumped", 1)
    assert job.orders() == [Order("made"), Order("over", 85)]


def test_late_results_of_an_earlier_attempt_do_not_count() -> None:
    job = running()
    job.tell(0, "leave", 1, "SIGURG")
    job.orders()
    job.tell(0, "dumped", 7)
    job.tell(1, "dumped", 7)
    assert job.orders() == []
