"""Borrowers that are killed, with or without their guards, in each phase; and a reboot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

import gpucr
from gpucr.borrow import ledger
from gpucr.cli import main
from gpucr.cli.output import JsonWanted
from gpucr.jobs.registered import registry
from tests.borrow.jobs import Machine, SharedJob, counter_command, guards, kill_guards, phase, waits
from tests.command import parsed
from tests.counter import DEADLINE_S, wait_until

pytestmark = [pytest.mark.root, pytest.mark.in_turn]


def kill(borrower: subprocess.Popen[Any]) -> None:
    borrower.kill()
    borrower.wait(DEADLINE_S)


def wait_back(job: SharedJob) -> None:
    wait_until(lambda: not job.is_lent and not guards(), lambda: f"the guard: {_guard_log()}")


def _guard_log() -> str:
    return (Path(os.environ["XDG_STATE_HOME"]) / "gpucr" / "borrow" / "guards.log").read_text()


def test_killed_while_it_waits(shared: Machine) -> None:
    low, _ = shared.job("low"), shared.job("high", priority=99)
    borrower = shared.borrow(*shared.until("eval"))
    wait_until(lambda: phase() == "waiting", "the borrower")
    kill(borrower)
    wait_until(lambda: phase() is None, _guard_log)
    assert (low.ask(), shared.runs("eval")) == (101, False)


def test_killed_while_jobs_make_room(shared: Machine, tmp_path: Path) -> None:
    first = shared.job("first", priority=5)
    second = shared.job("second", faults=f"checkpoint=until:{tmp_path / 'slow'}")
    borrower = shared.borrow(*shared.until("eval"))
    wait_until(lambda: second.is_lent, "the second suspend")
    kill(borrower)
    (tmp_path / "slow").touch()
    wait_back(second)
    assert (first.ask(), second.ask(), shared.runs("eval")) == (101, 101, False)
    assert phase() is None


def test_killed_while_the_command_runs(shared: Machine) -> None:
    job = shared.job("train")
    borrower = shared.borrow(*shared.until("eval"))
    shared.wait_runs("eval")
    kill(borrower)
    wait_back(job)
    assert (job.ask(), phase()) == (101, None)
    state = registry().find("borrow-1").state
    assert (state.word, state.signal) == ("ended", signal.SIGTERM)


def test_killed_while_jobs_come_back(shared: Machine, tmp_path: Path) -> None:
    job = shared.job("train", faults=f"restore=until:{tmp_path / 'slow'}")
    borrower = shared.borrow("--", "sh", "-c", 'touch "$0"', str(tmp_path / "done"))
    wait_until(lambda: (tmp_path / "done").exists() and phase() is None, lambda: f"the way back: {shared.talk()}")
    kill(borrower)
    (tmp_path / "slow").touch()
    wait_back(job)
    assert job.ask() == 101


@pytest.mark.parametrize("next_command", ["borrow", "supervise"])
def test_killed_with_its_guard_the_next_command_recovers(shared: Machine, next_command: str, tmp_path: Path) -> None:
    job = shared.job("train")
    borrower = shared.borrow(*shared.until("eval"))
    shared.wait_runs("eval")
    kill_guards()
    kill(borrower)
    (found,) = gpucr.list_borrowed().borrowers
    assert (found.name, found.gone) == ("borrow-1", True)
    assert job.state == "suspended"
    words = {
        "borrow": ("borrow", "--gpu", "1", "--no-isolate", "--", "true"),
        "supervise": ("supervise", "--all"),
    }
    done = CliRunner().invoke(main.command, words[next_command], obj=JsonWanted())
    assert (done.exit_code, "train is back" in done.stderr) == (0, True), done.output
    assert (job.ask(), waits()) == (101, {})


def test_a_waiting_borrower_recovers_for_a_dead_one(shared: Machine) -> None:
    job = shared.job("train")
    first = shared.borrow(*shared.until("a"))
    shared.wait_runs("a")
    second = shared.borrow(*shared.until("b"))
    wait_until(lambda: phase("borrow-2") == "waiting", "the second one")
    kill_guards()
    kill(first)
    shared.wait_runs("b")
    assert job.state == "suspended"
    shared.let_go("b")
    assert second.wait(DEADLINE_S) == 7
    assert job.ask() == 101


def run_here(*options: str) -> object:
    return parsed(CliRunner().invoke(main.command, ["borrow", *options], obj=JsonWanted()).stdout)


def test_nothing_to_recover(machine: list[str]) -> None:
    assert run_here("--recover", "--json") == {
        "schema": "gpucr.borrow.recover", "schema_version": 1, "back": [], "lent_jobs": [], "failed": [],
    }  # fmt: skip
    assert gpucr.recover_borrowed() == ()
    assert run_here("--list", "--json") == {
        "schema": "gpucr.borrow.list", "schema_version": 1, "borrowers": [], "lent_jobs": [],
    }  # fmt: skip


def test_a_job_that_cannot_come_back_is_retried(
    shared: Machine,
) -> None:
    job = shared.job("train", faults="restore#1=999")
    with pytest.raises(gpucr.DriverError) as caught:
        gpucr.borrow_gpus(["true"], "0", isolate=False)
    assert "`gpucr borrow --recover` tries again" in str(caught.value.hint)
    wait_back(job)  # the guard tries it, too
    assert job.ask() == 101


SHORT_OF_MEMORY = """
import sys, gpucr
from gpucr.linux import memory
memory.machine_available_bytes = lambda: int(sys.argv[1])
sys.exit(gpucr.borrow_gpus(sys.argv[3:], "0", to=sys.argv[2], isolate=False))
"""


def _reboot() -> None:
    """What was written before was written under another boot."""
    for each in ledger.borrowings():
        ledger._write(replace(each, boot_id="an earlier one"))
    for listed_job in registry().jobs():
        if listed_job.record is not None:
            os.kill(listed_job.record.pid, signal.SIGKILL) if listed_job.state.word == "running" else None
            registry().update(listed_job.record, boot_id="an earlier one")


@pytest.mark.criu
def test_after_a_reboot_dumped_jobs_come_back(shared: Machine, tmp_path: Path) -> None:
    dumped, lost = shared.job("dumped"), shared.job("kept", priority=5)
    arguments = [150 << 20, tmp_path / "snapshots", *shared.until("eval")[1:]]
    borrower = subprocess.Popen([sys.executable, "-c", SHORT_OF_MEMORY, *map(str, arguments)])
    shared.wait_runs("eval")
    assert (dumped.state, lost.state) == ("dumped", "suspended")
    kill_guards()
    kill(borrower)
    _reboot()
    states = {each.name: each.state for each in gpucr.list_borrowed().lent}
    assert (states["dumped"], states["kept"] in ("lost", "ended")) == ("dumped", True)
    done = CliRunner().invoke(main.command, ["borrow", "--recover"], obj=JsonWanted())
    assert (done.exit_code, "kept has ended while its GPUs were lent" in done.stderr) == (0, True), done.output
    assert (dumped.ask(), waits()) == (101, {})
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_a_damaged_record(machine: list[str]) -> None:
    made = ledger.enter(priority=1, gpus=(machine[0],), command=("x",))
    (path,) = ledger._folder().glob("borrow-*.json")
    assert ledger.borrowings() == (made,)
    for damage in (b"", b"{", path.read_bytes().replace(b'"waiting"', b'"sleeping"')):
        path.write_bytes(damage)
        with pytest.raises(gpucr.InvalidRequest, match=str(path)) as caught:
            gpucr.list_borrowed()
        assert caught.value.code == "GPUCR-BORROW-DAMAGED"


def test_a_borrower_that_lent_its_gpu_is_killed(shared: Machine) -> None:
    train = shared.job("train")
    first = shared.borrow("--", *counter_command())
    wait_until(lambda: _is_on_gpu("borrow-1"), "the first command")
    second = shared.borrow(*shared.until("b"), priority=20)
    shared.wait_runs("b")
    kill(first)
    wait_until(lambda: phase("borrow-1") is None, _guard_log)
    assert (train.state, waits()) == ("suspended", {"borrow-2": (), "train": ("borrow-2",)})
    shared.let_go("b")
    assert second.wait(DEADLINE_S) == 7
    assert train.ask() == 101


def _is_on_gpu(name: str) -> bool:
    return any(job.name == name and job.device_bytes for job in gpucr.list_gpu_jobs())
