"""List lent GPUs, who waits for whom, and what dead borrowers have left."""

from __future__ import annotations

from msgspec import Struct

from gpucr.borrow import ledger, policy
from gpucr.borrow.ledger import BorrowPhase
from gpucr.borrow.lend import look
from gpucr.borrow.recovery import recover
from gpucr.operations.chosen import lent_jobs


class Borrower(Struct, frozen=True):
    """A borrower. ``gpus`` are UUIDs; ``waits_for``: names of borrowers and jobs, if it waits.

    ``gone``: it and its guard were killed; `recover_borrowed` does their work.
    """

    name: str
    priority: int
    phase: BorrowPhase
    gpus: tuple[str, ...]
    pid: int
    command: tuple[str, ...]
    created_s: float
    waits_for: tuple[str, ...]
    gone: bool


class LentJob(Struct, frozen=True):
    """A job that has made room. ``snapshot``: where it is, None: in host memory. ``waits_for``: names of borrowers."""

    name: str
    priority: int
    state: str
    gpus: tuple[str, ...]
    snapshot: str | None
    waits_for: tuple[str, ...]


class Borrowed(Struct, frozen=True):
    """All borrowers, in the order of the queue, and all jobs that have made room."""

    borrowers: tuple[Borrower, ...]
    lent: tuple[LentJob, ...]


def list_borrowed() -> Borrowed:
    """Who borrows which GPUs, and who waits for whom. Changes nothing.

    Raises InvalidRequest for a damaged record of a borrower, Unsupported, DriverUnavailable.
    """
    here, away = ledger.borrowings(), lent_jobs()
    if not here and not away:
        return Borrowed((), ())
    jobs = look().jobs
    borrowers = tuple(
        Borrower(
            each.name,
            each.priority,
            each.phase,
            each.gpus,
            each.process.pid,
            each.command,
            each.created_s,
            () if each.is_active else policy.blockers(each, here, jobs),
            each.is_gone,
        )
        for each in here
    )
    lent = tuple(
        LentJob(
            job.name,
            job.priority,
            listed.state.word,
            tuple(sorted(job.gpus)),
            listed.record.snapshot if listed.state.word == "dumped" else None,
            policy.keepers_away(job, here, jobs),
        )
        for job in jobs
        if job.is_lent and (listed := away.get(job.name)) is not None and listed.record is not None
    )
    return Borrowed(borrowers, lent)


def recover_borrowed() -> tuple[str, ...]:
    """Finish the work of killed borrowers: end their commands, and bring back the jobs that made room for them.

    Returns the names of those that are back. Raises, after trying all, the error of one that could not come back;
    InvalidRequest for a damaged record of a borrower, Unsupported.
    """
    settled = recover(lambda _: None)
    for _, error in settled.failed:
        raise error
    return settled.back
