"""`gpucr borrow`: jobs make room by priority and come back, however the command ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import gpucr
from gpucr.borrow import borrower, lend
from gpucr.cli import main
from gpucr.cli.output import JsonWanted
from gpucr.driver.gpus import gpu_processes, list_gpus
from gpucr.jobs import selection
from gpucr.jobs.registered import registry
from gpucr.linux import processes
from gpucr.operations import chosen
from tests.borrow.at_work import OtherGpucr, checkpoint_of
from tests.borrow.jobs import Machine, counter_command, phase, waits
from tests.command import parsed
from tests.counter import DEADLINE_S, CounterFactory, wait_until
from tests.storm import later

pytestmark = [pytest.mark.root, pytest.mark.in_turn]


def refusal(kind: type[gpucr.GpucrError], command_line: Sequence[str] = ("true",), **options: Any) -> gpucr.GpucrError:
    """What a borrower of GPU 0 that cannot run has raised."""
    with pytest.raises(kind) as caught:
        gpucr.borrow_gpus(command_line, "0", isolate=False, **options)
    return caught.value


def run_here(*arguments: str) -> Result:
    """The command in this process."""
    return CliRunner().invoke(main.command, arguments, obj=JsonWanted())


def names_on_gpus() -> set[str | None]:
    return {job.name for job in gpucr.list_gpu_jobs() if job.device_bytes}


def test_no_job_has_to_make_room(shared: Machine) -> None:
    code = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); sys.exit(7)"
    borrower = shared.borrow("--", sys.executable, "-c", code, gpu="1,0")
    out, err = borrower.communicate(timeout=DEADLINE_S)
    assert borrower.returncode == 7, err
    assert out == ",".join(gpu.uuid for gpu in reversed(list_gpus())) + "\n"
    assert gpucr.list_borrowed() == gpucr.Borrowed((), ())


def test_a_plan_says_who_makes_room_and_changes_nothing(
    shared: Machine, in_room: Callable[[int], None], tmp_path: Path
) -> None:
    first, low = shared.job("first", priority=5, mib=120), shared.job("low", priority=1)
    high = shared.job("high", priority=50, devices="1")
    there = parsed(run_here("borrow", "--gpu", "0", "--dry-run", "--json", "true").stdout)
    assert (there["waits_for"], there["room"]) == ([], {"first": None, "low": None})
    assert gpucr.plan_borrow(["true"], "0,1", priority=20).waits_for == ("high",)
    said = run_here("borrow", "--gpu", "0,1", "--priority", "20", "--dry-run", "true").stdout
    assert said.startswith("wait for high\n")
    in_room(250 << 20)
    stored = tmp_path / "new" / "folder"
    assert (gpucr.plan_borrow(["true"], "0", to=str(stored)).room["low"] or "").startswith(f"{stored}/low-")
    assert not stored.parent.exists()
    assert gpucr.list_borrowed() == gpucr.Borrowed((), ())
    assert [job.state for job in (first, low, high)] == ["running"] * 3


@pytest.mark.parametrize("why", ["has to wait", "no host memory", "stranger", "no such GPU"])
def test_a_plan_is_refused_as_the_borrower_is(
    why: str, shared: Machine, counter: CounterFactory, in_room: Callable[[int], None]
) -> None:
    options: dict[str, Any] = {"isolate": False}
    gpus = "7" if why == "no such GPU" else "0"
    if why == "stranger":
        counter("--mib", "1")
    else:
        shared.job("other", priority=50 if why == "has to wait" else 1)
    if why == "has to wait":
        options |= {"wait": False, "priority": 20}
    if why == "no host memory":
        in_room(1 << 10)
    said = []
    for ask in (gpucr.plan_borrow, gpucr.borrow_gpus):
        with pytest.raises(gpucr.GpucrError) as caught:
            ask(["true"], gpus, **options)
        said.append((caught.value.code, caught.value.exit_code, caught.value.message))
    assert said[0] == said[1]


@pytest.mark.by_user
@pytest.mark.parametrize("interpose", [later("0"), "1"])
def test_jobs_of_a_lower_priority_make_room_and_come_back(
    shared: Machine, monkeypatch: pytest.MonkeyPatch, interpose: str
) -> None:
    monkeypatch.setenv("GPUCR_INTERPOSE", interpose)
    low, lower = shared.job("low", priority=9), shared.job("lower", priority=0)
    other = shared.job("o", priority=100, devices="1")
    assert [job.ask() for job in (low, lower, other)] == [101] * 3
    borrower = shared.borrow(*shared.until("eval"))
    shared.wait_runs("eval")
    assert [job.state for job in (low, lower, other)] == ["suspended", "suspended", "running"]
    assert (low.gpus(), lower.gpus(), other.gpus()) == (set(), set(), {1})
    found = parsed(run_here("borrow", "--list", "--json").stdout)
    assert [(each["name"], each["phase"], each["waits_for"]) for each in found["borrowers"]] == [
        ("borrow-1", "running", [])
    ]
    assert {each["name"]: each["waits_for"] for each in found["lent_jobs"]} == {
        "low": ["borrow-1"],
        "lower": ["borrow-1"],
    }
    listed = parsed(run_here("jobs", "--json").stdout)["jobs"]
    assert {job["name"]: (job["priority"], job["lent"], job["waits_for"]) for job in listed} == {
        "borrow-1": (10, False, []), "low": (9, True, ["borrow-1"]), "lower": (0, True, ["borrow-1"]),
        "o": (100, False, []),
    }  # fmt: skip
    heading, _, *rows = run_here("jobs").stdout.splitlines()
    assert ("LENT TO" in heading, [row.split().count("borrow-1") for row in rows]) == (True, [1, 1, 0])
    assert gpucr.resume_jobs(gpus="0") == (), "they are not its jobs to resume"
    shared.let_go("eval")
    _, err = borrower.communicate(timeout=DEADLINE_S)
    assert borrower.returncode == 7, err
    assert [job.ask() for job in (low, lower, other)] == [102] * 3
    assert [job.is_lent for job in (low, lower)] == [False, False]
    assert "low is back" in err


def test_a_job_of_a_higher_priority_is_waited_for(shared: Machine) -> None:
    low, _ = shared.job("low"), shared.job("high", priority=10)
    assert refusal(gpucr.Unsupported, priority=10, wait=False).code == "GPUCR-BORROW-BUSY"
    borrower = shared.borrow(*shared.until("eval"))
    wait_until(lambda: phase() is not None, "the borrower")
    assert waits() == {"borrow-1": ("high",)}
    assert (low.state, low.ask(), phase()) == ("running", 101, "waiting")
    gpucr.stop_job("high")
    shared.wait_runs("eval")
    assert low.state == "suspended"
    shared.let_go("eval")
    assert borrower.wait(DEADLINE_S) == 7
    assert low.ask() == 102


@pytest.mark.parametrize("number", [signal.SIGINT, later(signal.SIGHUP)])
def test_a_signal_goes_to_the_command_and_the_jobs_come_back(shared: Machine, number: signal.Signals) -> None:
    job = shared.job("train")
    borrower = shared.borrow(*shared.until("eval"))
    shared.wait_runs("eval")
    borrower.send_signal(number)
    _, err = borrower.communicate(timeout=DEADLINE_S)
    assert borrower.returncode == 128 + number, err
    assert job.ask() == 101


def test_a_command_that_handles_a_signal_has_its_own_exit_code(shared: Machine) -> None:
    job = shared.job("train")
    script = 'trap "exit 9" TERM; touch "$0-runs"; while :; do sleep 0.01; done'
    borrower = shared.borrow("--", "sh", "-c", script, str(shared.folder / "eval"))
    shared.wait_runs("eval")
    borrower.send_signal(signal.SIGTERM)
    assert borrower.wait(DEADLINE_S) == 9
    assert job.ask() == 101


def test_processes_the_command_leaves_behind_are_ended(shared: Machine) -> None:
    job = shared.job("train")
    left = 'sleep 600 & echo $! > "$0-left"; exit 0'
    assert gpucr.borrow_gpus(["sh", "-c", left, str(shared.folder / "eval")], "0", isolate=False) == 0
    pid = int((shared.folder / "eval-left").read_text())
    # Killed, it is there until whoever has it now collects it.
    wait_until(lambda: (stat := processes.read_stat(pid)) is None or stat.status in "ZX", "what was left to end")
    assert job.ask() == 101


def test_a_missing_program(shared: Machine) -> None:
    job = shared.job("train")
    assert refusal(gpucr.InvalidRequest, ["/no/such/program"]).code == "GPUCR-NO-PROGRAM"
    assert (job.state, job.ask()) == ("running", 101)


@pytest.mark.by_user
def test_a_signal_while_jobs_make_room_undoes_it(shared: Machine, tmp_path: Path) -> None:
    first = shared.job("first", priority=5)
    second = shared.job("second", faults=f"checkpoint=until:{tmp_path / 'slow'}")
    borrower = shared.borrow(*shared.until("eval"))
    wait_until(lambda: second.is_lent, lambda: f"the second suspend: {shared.talk()}")
    borrower.send_signal(signal.SIGTERM)
    (tmp_path / "slow").touch()
    _, err = borrower.communicate(timeout=DEADLINE_S)
    assert borrower.returncode == 130, err
    assert "GPUCR-INTERRUPTED" in err
    assert (first.ask(), second.ask()) == (101, 101)
    assert (first.is_lent, second.is_lent, shared.runs("eval")) == (False, False, False)


@pytest.mark.by_user
def test_if_one_job_cannot_make_room_all_come_back(shared: Machine) -> None:
    first, second = shared.job("first", priority=5), shared.job("second", faults="checkpoint=999")
    assert refusal(gpucr.DriverError).message.startswith("the job second: ")
    assert (first.ask(), second.ask()) == (101, 101)
    assert waits() == {}


def test_an_unsuspendable_job_is_refused_before_anything_starts(shared: Machine) -> None:
    first, second = shared.job("first", priority=5), shared.job("second")
    pid = second.record.pid
    os.kill(pid, signal.SIGSTOP)
    lines: list[str] = []
    assert refusal(gpucr.Unsupported, say=lines.append).message.startswith("the job second: ")
    os.kill(pid, signal.SIGCONT)
    assert lines == []
    assert (first.ask(), second.ask()) == (101, 101)


def test_processes_gpucr_did_not_start_are_refused(shared: Machine, counter: CounterFactory) -> None:
    job, stranger = shared.job("train"), counter("--mib", "1")
    refused = refusal(gpucr.Unsupported)
    assert (refused.code, str(stranger.pid) in refused.message) == ("GPUCR-BORROW-STRANGER", True)
    assert (job.ask(), stranger.ask()) == (101, 101)
    assert gpucr.borrow_gpus(["true"], "1", isolate=False) == 0


def test_a_process_that_has_just_ended_is_not_a_stranger(shared: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    job = shared.job("train")
    before = gpu_processes()
    assert [use.pid for use in before] == [job.record.pid]
    gpucr.stop_job("train")
    looks = iter([before])
    monkeypatch.setattr("gpucr.borrow.lend.gpu_processes", lambda: next(looks, None) or gpu_processes())
    assert gpucr.borrow_gpus(["true"], "0", isolate=False) == 0


@pytest.mark.by_user
@pytest.mark.parametrize("vault_on", [0, 1])
def test_a_checkpoint_is_waited_for_and_its_vault_is_not_a_stranger(
    shared: Machine, machine: list[str], vault_on: int
) -> None:
    """On the job's GPU all of the job's memory is away, on the other one only the vault is to be seen."""
    job = shared.job("train")
    with checkpoint_of(job.record.pid, machine[vault_on]) as other:
        assert {use.pid for use in gpu_processes()} == {other.pid}
        listed = {each.process.pid for each in gpucr.list_cuda_processes()}
        assert (job.record.pid in listed, other.pid in listed) == (True, False)
        lines: list[str] = []
        command = ["sh", "-c", "while :; do sleep 0.01; done"]
        cancel = gpucr.Cancellation()

        def say(line: str) -> None:
            lines.append(line)
            if line == "borrow-1 waits for another gpucr's work on train":
                other.let_go()
            if line.startswith("borrow-1 runs"):
                assert job.is_lent, "it had made room before"
                assert {use.pid for use in gpu_processes()} == set()
                cancel.cancel("enough")

        gpu = str(vault_on) if vault_on == 0 else "0,1"
        assert gpucr.borrow_gpus(command, gpu, isolate=False, say=say, cancel=cancel) == 128 + signal.SIGTERM
        assert [line.split()[1] for line in lines[:3]] == ["waits", "made", "runs"]
        assert other.lives, "it has had CUDA all the time, and is no job for that"
    assert job.ask() == 101


def test_work_on_another_gpu_is_not_waited_for(shared: Machine) -> None:
    job, lines = shared.job("train", devices="1"), list[str]()
    with gpucr.freeze("train"):
        assert gpucr.borrow_gpus(["true"], "0", isolate=False, say=lines.append) == 0
    assert [line.split()[1] for line in lines] == ["runs"]
    assert job.ask() == 101


def test_a_job_another_gpucr_does_not_release(
    shared: Machine, machine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may belong on any GPU."""
    job = shared.job("train")
    monkeypatch.setattr(chosen, "BUSY_S", 0.2)
    with checkpoint_of(job.record.pid, machine[0]) as other:
        error = refusal(gpucr.Unsupported)
        assert (error.code, "still works on train" in str(error)) == ("GPUCR-BUSY", True)
        other.let_go()
        assert job.ask() == 101
    assert gpucr.list_borrowed() == gpucr.Borrowed((), ())


def test_a_checkpoint_that_begins_after_the_job_was_seen(
    shared: Machine, machine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stopped processes are no reason to refuse."""
    job, look, take = shared.job("train"), lend.look, selection.claimed_job
    others: list[OtherGpucr] = []

    def look_and_begin(wanted: Collection[str] = ()) -> lend.Seen:
        seen = look(wanted)
        if not others:
            others.append(opened.enter_context(checkpoint_of(job.record.pid, machine[1])))
        return seen

    @contextlib.contextmanager
    def take_or_let_go(*target: Any, **options: Any) -> Iterator[selection.FoundJob]:
        try:
            with take(*target, **options) as found:
                yield found
        except gpucr.Unsupported:
            others[0].let_go()
            raise

    with contextlib.ExitStack() as opened:
        monkeypatch.setattr(borrower, "look", look_and_begin)
        monkeypatch.setattr(selection, "claimed_job", take_or_let_go)
        assert gpucr.borrow_gpus(["true"], "0", isolate=False) == 0
    assert len(others) == 1
    assert job.ask() == 101


def test_a_job_ends_meanwhile(shared: Machine) -> None:
    job, other = shared.job("train"), shared.job("other")
    borrower = shared.borrow(*shared.until("eval"))
    shared.wait_runs("eval")
    gpucr.stop_job("train", grace_s=0)
    shared.let_go("eval")
    _, err = borrower.communicate(timeout=DEADLINE_S)
    assert borrower.returncode == 7, err
    assert "train has ended while its GPUs were lent" in err
    assert (job.is_lent, other.ask()) == (False, 101)


def test_a_job_is_lost_while_it_makes_room(shared: Machine) -> None:
    first, lost = shared.job("first", priority=5), shared.job("lost", faults="checkpoint=die")
    refusal(gpucr.JobDamaged, shared.until("eval")[1:])
    assert (first.ask(), lost.is_lent, shared.runs("eval")) == (101, False, False)


def test_a_borrower_lends_its_gpu(shared: Machine) -> None:
    train = shared.job("train")
    first = shared.borrow("--", *counter_command())
    wait_until(lambda: "borrow-1" in names_on_gpus(), lambda: f"the first command: {shared.talk()}")
    second = shared.borrow(*shared.until("b"), priority=20)
    shared.wait_runs("b")
    lent = {each.name: each.waits_for for each in gpucr.list_borrowed().lent}
    assert lent == {"borrow-1": ("borrow-2",), "train": ("borrow-1", "borrow-2")}
    shared.let_go("b")
    _, err = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 7, err
    assert "borrow-1 is back" in err
    assert "train comes back when borrow-1 has ended" in err
    assert train.state == "suspended"
    first.send_signal(signal.SIGTERM)
    assert first.wait(DEADLINE_S) == 0, "as the counter ends"
    assert train.ask() == 101


def test_the_outer_borrower_ends_first(shared: Machine) -> None:
    """What it has borrowed comes back when the other one has no GPU any more, and not before."""
    train = shared.job("train")
    first = shared.borrow("--", *counter_command())
    wait_until(lambda: "borrow-1" in names_on_gpus(), lambda: f"the first command: {shared.talk()}")
    second = shared.borrow(*shared.until("b"), priority=20)
    shared.wait_runs("b")
    gpucr.stop_job("borrow-1", grace_s=0)
    _, err = first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 128 + signal.SIGKILL
    assert "train comes back when borrow-2 has ended" in err
    assert train.state == "suspended"
    shared.let_go("b")
    assert second.wait(DEADLINE_S) == 7
    assert train.ask() == 101


def _is_in_line(name: str) -> bool:
    return phase(name) is not None


def test_three_borrowers_in_line(shared: Machine) -> None:
    train = shared.job("train")
    names = ("a", "b", "c")
    borrowers = []
    for number, name in enumerate(names, 1):
        borrowers.append(shared.borrow(*shared.until(name)))
        wait_until(partial(_is_in_line, f"borrow-{number}"), "its place in the line")
    shared.wait_runs("a")
    assert waits() == {
        "borrow-1": (), "borrow-2": ("borrow-1",), "borrow-3": ("borrow-1", "borrow-2"), "train": ("borrow-1",),
    }  # fmt: skip
    for number, name in enumerate(names):
        shared.wait_runs(name)
        assert [shared.runs(each) for each in names[number + 1 :]] == [False] * (2 - number)
        shared.let_go(name)
        assert borrowers[number].wait(DEADLINE_S) == 7
    assert train.ask() == 101
    assert registry().find("train").record == train.record


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--", "true"), "name the GPUs"),
        (("--gpu", "0"), "name the GPUs and what to run"),
        (("--gpu", "0,", "--", "true"), "does not name GPUs"),
        (("--gpu", "9", "--", "true"), "9"),
        (("--gpu", "0", "--priority", "1001", "--", "true"), "1001"),
        (("--list", "--recover"), "go alone"),
        (("--gpu", "0", "--json", "--", "true"), "--json goes with"),
        (("--gpu", "0", "--to", "x", "--key-file", "/no/key", "--", "true"), "/no/key"),
    ],
)
def test_bad_input(machine: list[str], arguments: tuple[str, ...], why: str) -> None:
    done = run_here("borrow", *arguments)
    said = str(done.exception) if isinstance(done.exception, gpucr.GpucrError) else done.output
    assert why in said
    assert isinstance(done.exception, gpucr.InvalidRequest) or done.exit_code == 2
