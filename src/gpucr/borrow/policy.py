"""Who may have a GPU: pure functions of borrowers and jobs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct

from gpucr.borrow.ledger import Borrowing


class Occupant(Struct, frozen=True):
    """A registered job that is on GPUs, or is to come back to them (``is_lent``)."""

    name: str
    priority: int
    gpus: frozenset[str]
    is_lent: bool = False


def blockers(me: Borrowing, others: Sequence[Borrowing], jobs: Sequence[Occupant]) -> tuple[str, ...]:
    """The names of borrowers and jobs that this borrower has to wait for.

    Those of at least its priority that have one of its GPUs, or are to come back to it; and those ahead in the queue:
    of a higher priority, or of the same and earlier.
    """
    found = [
        other.name
        for other in others
        if other.number != me.number
        and _share(me.gpus, other.gpus)
        and (other.priority > me.priority or (other.priority == me.priority and _is_before(other, me)))
    ]
    found += [job.name for job in jobs if _share(me.gpus, job.gpus) and job.priority >= me.priority]
    return tuple(dict.fromkeys(found))


def victims(me: Borrowing, jobs: Sequence[Occupant]) -> tuple[Occupant, ...]:
    """The jobs on its GPUs that have to make room, those to bring back first in front."""
    found = [job for job in jobs if not job.is_lent and _share(me.gpus, job.gpus) and job.priority < me.priority]
    return tuple(sorted(found, key=lambda job: (-job.priority, job.name)))


def keepers_away(job: Occupant, borrowers: Sequence[Borrowing], jobs: Sequence[Occupant]) -> tuple[str, ...]:
    """The borrowers that keep a lent job from coming back: those that have or are about to get one of its GPUs.

    A borrower does not keep its own command's job away. A waiting one counts if it has a higher priority and waits for
    nothing else: it would suspend the job again at once.
    """
    found = []
    for each in borrowers:
        if each.name == job.name or not _share(each.gpus, job.gpus):
            continue
        is_next = each.priority > job.priority and not blockers(each, borrowers, jobs)
        if each.is_active or is_next:
            found.append(each.name)
    return tuple(found)


def _is_before(other: Borrowing, me: Borrowing) -> bool:
    return other.is_active or other.number < me.number


def _share(some: Collection[str], others: Collection[str]) -> bool:
    return any(uuid in others for uuid in some)
