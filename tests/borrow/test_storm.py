"""Borrowers, their guards and their commands are killed at random: every job is back in the end, as it was."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from functools import partial

import pytest

import gpucr
from gpucr.jobs.registered import registry
from tests.borrow.jobs import Machine, counter_command, guards, waits
from tests.counter import wait_until
from tests.storm import long

pytestmark = pytest.mark.root

ROUNDS = 40
"""Of three borrowers and four kills each."""


def _kill_one(dice: random.Random, borrowers: list[subprocess.Popen[str]]) -> None:
    """SIGKILL to a borrower, to a guard, to both kinds at once, or to a command."""
    what = dice.choice(("borrower", "guard", "both", "command"))
    pids = [dice.choice(borrowers).pid] if what in ("borrower", "both") else []
    if what in ("guard", "both"):
        pids += guards()
    if what == "command":
        pids += [
            job.record.pid
            for job in registry().jobs()
            if job.name.startswith("borrow-") and job.record is not None and job.state.word == "running"
        ]
    for pid in pids:
        if all(each.pid != pid or each.poll() is None for each in borrowers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _command(dice: random.Random) -> list[str]:
    """One that uses the GPUs, and can be borrowed from, or one that does not. Both end soon."""
    seconds = f"{dice.uniform(0, 1):.2f}"
    return ["--", "timeout", seconds, *counter_command()] if dice.random() < 0.5 else ["--", "sleep", seconds]


@long
def test_no_job_is_lost_in_a_storm(shared: Machine) -> None:
    dice = random.Random(7)  # noqa: S311 - the same storm each time
    jobs = [shared.job("one", priority=50, devices="0"), shared.job("both", devices="0,1")]
    answer, lent = 100, 0
    for number in range(ROUNDS):
        borrowers = [
            shared.borrow(*_command(dice), gpu=dice.choice(("0", "1", "0,1")), priority=dice.choice((40, 80, 200, 300)))
            for _ in range(3)
        ]
        for _ in range(4):
            time.sleep(dice.uniform(0, 1.2))  # at any moment: that is what a storm is
            lent += len(gpucr.list_borrowed().lent)
            _kill_one(dice, borrowers)
        wait_until(partial(_have_ended, borrowers), "the borrowers to end")
        wait_until(lambda: not guards(), "the guards to end")
        gpucr.recover_borrowed()
        answer += 1
        assert [(job.state, job.is_lent, job.ask()) for job in jobs] == [("running", False, answer)] * 2, number
        assert waits() == {}, number
        assert [job.gpus() for job in jobs] == [{0}, {0, 1}], number
    assert lent > 0, "the storm has passed by"


def _have_ended(borrowers: list[subprocess.Popen[str]]) -> bool:
    """Whether all have ended; those that wait for a job that never ends are told to."""
    for each in gpucr.list_borrowed().borrowers:
        if {"one", "both"} & set(each.waits_for) and not each.gone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGTERM)
    return all(each.poll() is not None for each in borrowers)
