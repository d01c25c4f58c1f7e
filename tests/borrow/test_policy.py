"""Who waits for whom, and which job may come back."""

from __future__ import annotations

from gpucr.borrow.ledger import Borrowing, BorrowPhase
from gpucr.borrow.policy import Occupant, blockers, keepers_away, victims
from gpucr.model import ProcessId


def borrower(number: int, priority: int, gpus: str, phase: BorrowPhase = "waiting") -> Borrowing:
    return Borrowing(number, priority, tuple(gpus), ("x",), ProcessId(1, 1), 0.0, phase)


def job(name: str, priority: int, gpus: str, *, lent: bool = False) -> Occupant:
    return Occupant(name, priority, frozenset(gpus), is_lent=lent)


def test_a_borrower_waits_for_jobs_of_its_own_priority_and_above_on_its_gpus() -> None:
    me = borrower(1, 10, "ab")
    jobs = [job("low", 9, "a"), job("same", 10, "b"), job("high", 11, "bc"), job("elsewhere", 99, "c")]
    assert blockers(me, [me], jobs) == ("same", "high")
    assert [each.name for each in victims(me, jobs)] == ["low"]


def test_a_borrower_waits_for_a_lent_job_that_is_to_come_back_before_it() -> None:
    me = borrower(1, 10, "a")
    assert blockers(me, [me], [job("train", 10, "a", lent=True)]) == ("train",)
    assert blockers(me, [me], [job("train", 9, "a", lent=True)]) == ()
    assert victims(me, [job("train", 9, "a", lent=True)]) == ()


def test_the_queue_is_ordered_by_priority_then_by_number() -> None:
    first, second, urgent, other = (
        borrower(1, 10, "a"),
        borrower(2, 10, "a"),
        borrower(3, 20, "a"),
        borrower(4, 99, "b"),
    )
    queue = [first, second, urgent, other]
    assert [blockers(each, queue, []) for each in queue] == [("borrow-3",), ("borrow-1", "borrow-3"), (), ()]


def test_a_running_borrower_is_waited_for_unless_its_priority_is_lower() -> None:
    me, at_work = borrower(1, 10, "a"), borrower(7, 10, "ab", "running")
    assert blockers(me, [me, at_work], []) == ("borrow-7",)
    assert blockers(borrower(8, 11, "b"), [me, at_work], []) == ()


def test_jobs_due_back_first_make_room_first() -> None:
    me = borrower(1, 10, "a")
    assert [each.name for each in victims(me, [job("b", 0, "a"), job("a", 0, "a"), job("c", 5, "a")])] == [
        "c",
        "a",
        "b",
    ]


def test_a_job_comes_back_when_no_borrower_holds_its_gpus() -> None:
    train = job("train", 0, "ab", lent=True)
    assert keepers_away(train, [], [train]) == ()
    assert keepers_away(train, [borrower(1, 10, "b", "running")], [train]) == ("borrow-1",)
    assert keepers_away(train, [borrower(1, 10, "c", "running")], [train]) == ()


def test_a_borrowers_command_comes_back_before_the_jobs_it_displaced() -> None:
    outer = borrower(1, 10, "a", "running")
    own, train = job("borrow-1", 10, "a", lent=True), job("train", 0, "a", lent=True)
    assert keepers_away(own, [outer], [own, train]) == ()
    assert keepers_away(train, [outer], [own, train]) == ("borrow-1",)


def test_a_job_stays_suspended_only_for_the_next_in_line() -> None:
    train = job("train", 0, "a", lent=True)
    assert keepers_away(train, [borrower(2, 10, "a")], [train]) == ("borrow-2",)
    assert keepers_away(train, [borrower(2, 0, "a")], [train]) == (), "the job goes first"
    held_up = [borrower(2, 10, "ab"), borrower(1, 10, "b", "running")]
    assert keepers_away(train, held_up, [train]) == (), "it would wait for nothing"
