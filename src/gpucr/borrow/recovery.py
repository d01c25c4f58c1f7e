"""Bring back jobs whose GPUs are free again, and clean up after dead borrowers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from msgspec import Struct

from gpucr.borrow import ledger, policy
from gpucr.borrow.ledger import Borrowing
from gpucr.borrow.lend import Say, bring_back, look, note_back
from gpucr.errors import GpucrError, InvalidRequest
from gpucr.jobs.registered import registry
from gpucr.operations.chosen import lent_jobs
from gpucr.operations.end_job import end_job, end_processes


class Settled(Struct, frozen=True):
    """The result: jobs that are back, those that wait and for whom, and those that could not be brought back."""

    back: tuple[str, ...] = ()
    waiting: tuple[tuple[str, tuple[str, ...]], ...] = ()
    failed: tuple[tuple[str, GpucrError], ...] = ()


def settle(say: Say) -> Settled:
    """Bring back every lent job whose GPUs no borrower has, highest priority first.

    Raises Unsupported if the registry cannot be read. What happens to a job is in the result.
    """
    if not lent_jobs():
        return Settled()
    back, waiting, failed = [], [], []
    priority = {job.name: job.priority for job in look().jobs}
    for name in sorted(lent_jobs(), key=lambda each: (-priority.get(each, 0), each)):
        listed = lent_jobs().get(name)
        if listed is None or listed.record is None or listed.record.lent is None:  # another process was faster
            continue
        is_over = listed.state.word in ("ended", "lost")
        with ledger.gpus_held(() if is_over else listed.record.lent.gpus):
            jobs = look().jobs
            job = next((each for each in jobs if each.name == name and each.is_lent), None)
            if job is None:
                continue
            away = policy.keepers_away(job, _there(), jobs)
            if away and not is_over:
                waiting.append((name, away))
                continue
            try:
                bring_back(name, say)
                if not is_over:
                    back.append(name)
            except GpucrError as e:
                say(f"{name} could not be brought back: {e}")
                failed.append((name, e))
    return Settled(tuple(back), tuple(waiting), tuple(failed))


def recover(say: Say) -> Settled:
    """End commands that dead borrowers have left running, and bring back the jobs that made room for them.

    Raises InvalidRequest for a damaged record of a borrower, Unsupported.
    """
    with ledger.alone():
        for each in ledger.borrowings():
            if each.is_gone:
                say(f"{each.name} is gone: what it ran is ended")
                end_command(each.name)
                ledger.leave(each)
    return settle(say)


def end_command(name: str) -> None:
    """End a borrower's command, if it runs. If it has made room itself, its snapshot stays.

    Raises JobDamaged if a process hangs in the kernel.
    """
    listed = registry().look(name)
    if listed is None or listed.record is None:
        return
    if listed.state.word == "running":
        with contextlib.suppress(InvalidRequest):  # it has just ended
            end_job(name)
    elif listed.state.word in ("ended", "lost"):
        end_processes(listed.record)
    note_back(name)


def _there() -> Sequence[Borrowing]:
    """Without dead waiting ones, which will never get their GPUs."""
    return [each for each in ledger.borrowings() if each.is_active or not each.is_gone]
