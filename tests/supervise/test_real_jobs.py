"""Jobs that are killed, drained and taken up, with real processes and CRIU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.jobs.registered import registry
from gpucr.jobs.registry import RECORD_NAME
from gpucr.linux import processes
from gpucr.model import CudaState
from gpucr.supervise.folder import SupervisedFolder
from tests import command
from tests.conftest import skip_or_fail
from tests.counter import wait_until
from tests.sandboxed import end_all_in, start_counter
from tests.supervise import jobs
from tests.supervise.jobs import own_state  # noqa: F401

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("own_state")]


def _steps(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "steps").read_text().split()]


def _wait_for_step(folder: Path, step: int) -> None:
    wait_until(lambda: (folder / "steps").exists() and step in _steps(folder), f"step {step}")


def test_a_killed_job_continues_without_loss(tmp_path: Path) -> None:
    started = jobs.run(tmp_path, "--", *jobs.counting(300, stop_at=290), every="1s")
    assert started["supervisor_pid"] > 0
    jobs.wait_for_event("checkpoint")
    _wait_for_step(tmp_path, _steps(tmp_path)[-1] + 2)
    jobs.kill_job()
    jobs.wait_for_event("restored")
    (tmp_path / "go").touch()
    jobs.wait_for_event("ended")
    assert jobs.state().phase == "finished"
    assert _steps(tmp_path) == list(range(300)), "nothing was lost, and nothing written twice"
    log = Path(started["log"]).read_text()
    assert "=== gpucr: " in log
    assert "signal 9; back to the snapshot" in log
    before, after = log.split("===\n")
    first, last = int(after.split()[0]), int(before.split("\n\n")[0].split()[-1])
    assert first <= last
    assert [int(line) for line in before.splitlines() if line.isdecimal()] == list(range(last + 1))
    assert [int(line) for line in after.split()] == list(range(first, 300))
    assert list(tmp_path.glob("steps.gpucr-*")), "what was cut off is kept"
    assert registry().find("train").state.exit_code == 0


def test_checkpoints_are_rehearsed_while_the_job_runs(tmp_path: Path) -> None:
    jobs.run(tmp_path, "--rehearse", "2", "--keep-last", "1", "--", *jobs.counting(400, stop_at=390))
    jobs.wait_for_event("rehearsed", 2)
    jobs.wait_for_event("pruned")
    assert not jobs.events("rehearsal-failed")
    jobs.kill_job()
    jobs.wait_for_event("restored")
    state = jobs.state()
    assert set(state.rehearsed.values()) == {True}
    assert state.rehearsals["success"] >= 2
    (tmp_path / "go").touch()
    jobs.wait_for_event("ended")
    assert _steps(tmp_path) == list(range(400))


@pytest.mark.by_user
def test_a_drained_job_resumes_where_it_was(tmp_path: Path) -> None:
    jobs.run(tmp_path, "--", *jobs.counting(80, stop_at=30), every="1h")
    _wait_for_step(tmp_path, 30)
    drained = command.run_json("supervise", "train", "--drain")
    assert drained["jobs"] == [{"name": "train", "phase": "draining"}]
    assert "drained" in command.run("jobs").stdout
    assert registry().find("train").state.word == "dumped"
    (tmp_path / "go").touch()
    (taken_up,) = command.run_json("supervise", "--all")["jobs"]
    assert taken_up["problem"] is None
    jobs.wait_for_event("ended", 2)
    assert jobs.state().phase == "finished"
    assert _steps(tmp_path) == list(range(80))
    assert command.run_json("supervise", "--all")["jobs"] == [], "what has finished is left alone"


@pytest.mark.by_user
def test_a_killed_supervisor_is_noticed_and_replaced_by_exactly_one(tmp_path: Path) -> None:
    pid = jobs.run(tmp_path, "--", *jobs.counting(80, stop_at=30), every="1h")["supervisor_pid"]
    again = command.run("supervise", "train", "--every", "1h", "--to", tmp_path / "store")
    assert again.returncode == 2
    assert "GPUCR-SUPERVISED" in again.stderr
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: SupervisedFolder("train").running() is None, "the supervisor to end")
    (taken_up,) = command.run_json("supervise", "--all")["jobs"]
    found = SupervisedFolder("train").running()
    assert found is not None
    assert taken_up["supervisor_pid"] == found.pid
    assert command.run_json("supervise", "--all")["jobs"] == []
    left = command.run_json("supervise", "train", "--leave")
    assert left["jobs"] == [{"name": "train", "phase": "left"}]
    assert not processes.is_alive(found)
    assert registry().find("train").state.word == "running"


CONTAINER = """
import os, signal, sys
from gpucr.supervise.folder import SupervisedFolder
from gpucr.supervise.settings import Supervision
from gpucr.supervise.start import require_store, run_supervised
store, folder, *command = sys.argv[1:]
run_supervised(command, Supervision(store=require_store(store, None), every_s=0.5), name="train", cwd=folder)
for line in sys.stdin:
    os.kill(SupervisedFolder("train").running().pid, signal.SIGKILL)
    while SupervisedFolder("train").running() is not None: pass
    print("killed", flush=True)
"""
"""Process 1 of a pid namespace: it starts a supervised job; for each line it kills the supervisor."""


def test_a_job_of_an_ended_container_is_taken_up_under_its_name(tmp_path: Path) -> None:
    unshare = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child"]
    words = [tmp_path / "store", tmp_path, *jobs.counting(100, stop_at=30)]
    with subprocess.Popen(
        [*unshare, sys.executable, "-c", CONTAINER, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as container:
        assert container.stdin is not None
        assert container.stdout is not None
        jobs.wait_for_event("checkpoint")
        done = command.run("supervise", "--all")
        assert done.returncode == 1
        assert "the job train has a supervisor already" in done.stderr

        print("kill it", file=container.stdin, flush=True)
        assert container.stdout.readline() == "killed\n"
        done = command.run("supervise", "--all")
        assert done.returncode == 1
        assert "maybe in a container, and may run there" in done.stderr
        assert jobs.state().phase == "supervised"
        assert registry().find("train").state.word == "elsewhere"
        container.kill()
    wait_until(lambda: registry().find("train").state.word == "lost", "its keeper to end")

    (taken_up,) = command.run_json("supervise", "--all")["jobs"]
    assert taken_up["problem"] is None
    jobs.wait_for_event("restored")
    (tmp_path / "go").touch()
    jobs.wait_for_event("ended")
    assert jobs.state().phase == "finished"
    assert [job.name for job in registry().jobs()] == ["train"]
    assert _steps(tmp_path) == list(range(100))


@pytest.mark.by_user
def test_a_job_that_waits_for_its_restart_is_listed(tmp_path: Path) -> None:
    jobs.run(tmp_path, "--", "sh", "-c", "exit 5", every="1h")

    def listed() -> str:
        return command.run("jobs").stdout

    def seen() -> tuple[str, str, str]:
        (job,) = command.run_json("jobs")["jobs"]
        return job["name"], job["state"], job["supervision"]["phase"]

    wait_until(lambda: "restarting (exit code 5)" in listed(), listed)
    wait_until(
        lambda: seen() == ("train", "ended", "supervised"), lambda: str(seen())
    )  # it runs for a moment each time
    command.run_json("supervise", "train", "--leave")
    assert "no jobs" in listed(), "nothing restarts it any more"
    SupervisedFolder("train").change_phase("gave-up")
    assert "gave-up" in listed()


def test_a_damaged_record_is_no_failure_of_the_job(tmp_path: Path) -> None:
    jobs.run(tmp_path, "--", *jobs.counting(100, stop_at=30))
    jobs.wait_for_event("checkpoint")
    record = registry().find("train").record
    assert record is not None
    path = Path(record.status_path).parent / RECORD_NAME
    whole = path.read_bytes()
    path.write_bytes(b"{")
    failed = jobs.state().checkpoints.get("failed", 0)
    wait_until(lambda: jobs.state().checkpoints.get("failed", 0) > failed, "a checkpoint, which needs the record")
    assert jobs.events("failed") == []
    assert processes.is_alive(record.root)
    command.run_json("supervise", "train", "--leave")
    SupervisedFolder("train").change_phase("supervised")
    done = command.run("supervise", "--all")
    assert done.returncode == 1
    assert "the record of the job train is damaged" in done.stderr
    path.write_bytes(whole)


def test_a_running_job_can_be_supervised(tmp_path: Path) -> None:
    started = gpucr.run_job(jobs.counting(60, stop_at=30), name="train", cwd=tmp_path)
    _wait_for_step(tmp_path, 30)
    done = command.run(
        "supervise", started.record.pid, "--every", "500ms", "--to", tmp_path / "store", "--keep-last", 2
    )
    assert done.returncode == 0, done.stderr
    jobs.wait_for_event("checkpoint", 4)
    jobs.kill_job()
    jobs.wait_for_event("restored")
    (tmp_path / "go").touch()
    jobs.wait_for_event("ended")
    assert _steps(tmp_path) == list(range(60))
    kept = gpucr.list_snapshots(tmp_path / "store").snapshots
    assert 1 <= len(kept) <= 3
    assert {each.name for each in kept} == {"train"}


def test_a_job_that_was_left_locked_is_resumed_not_killed(sim_only: None, driver: CudaDriver, tmp_path: Path) -> None:
    with start_counter(tmp_path, "--mib", "4", name="train") as job:
        driver.lock(job.pid, 5000)
        command.run_json("supervise", "train", "--every", "1h", "--to", tmp_path / "store")
        jobs.wait_for_event("resumed")
        assert driver.state(job.pid) is CudaState.RUNNING
        assert job.ask() == 101
        assert jobs.events("failed") == []
    end_all_in(tmp_path)


def _starts_over_when_killed(folder: Path) -> None:
    jobs.run(folder, "--", *jobs.counting(40, stop_at=20), every="1h")
    _wait_for_step(folder, 20)
    (folder / "steps").unlink()
    jobs.kill_job()
    jobs.wait_for_event("started-over")
    (folder / "go").touch()
    jobs.wait_for_event("ended")
    assert jobs.state().phase == "finished"
    assert _steps(folder) == list(range(40))


def test_before_its_first_checkpoint_a_job_is_restarted(tmp_path: Path) -> None:
    _starts_over_when_killed(tmp_path)


def test_another_machines_job_of_its_name_is_not_restored(sim_only: None, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "another name for the machine needs root")
    gpucr.init_store(tmp_path / "store")
    words = ["--uts", "sh", "-c", 'hostname elsewhere; exec "$@"', "sh", sys.executable, "-m", "gpucr"]
    with start_counter(tmp_path, name="other") as other:
        subprocess.run(["unshare", *words, "dump", str(other.pid), "--to", f"{tmp_path / 'store'}#train"], check=True)
    (snapshot,) = gpucr.list_snapshots(tmp_path / "store").snapshots
    assert (snapshot.name, snapshot.host) == ("train", "elsewhere")
    _starts_over_when_killed(tmp_path)


def test_an_unreachable_store_is_waited_for_while_the_job_runs(tmp_path: Path) -> None:
    jobs.run(tmp_path, "--", *jobs.counting(10_000), every="300ms")
    jobs.wait_for_event("checkpoint")
    (tmp_path / "store").rename(tmp_path / "away")
    jobs.wait_for_event("checkpoint-failed", 2)
    assert registry().find("train").state.word == "running"
    (tmp_path / "away").rename(tmp_path / "store")
    before = jobs.state().checkpoints["success"]
    wait_until(lambda: jobs.state().checkpoints["success"] > before, "the next checkpoint")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--every", "10m"], "give --every TIME (or auto) and --to STORE"),
        (["--every", "0s", "--to", "store"], "--every is 0 s"),
        (["--every", "ten minutes", "--to", "store"], "is not a time"),
        (["--every", "2d", "--to", "store"], "most of the work would be lost"),
        (["--every", "10m", "--to", "store#name"], "leave out what follows the #"),
        (["--every", "10m", "--to", "store", "--health", "'"], "is no command"),
    ],
)
def test_bad_requests_start_nothing(tmp_path: Path, options: list[str], words: str) -> None:
    done = command.run("run", "--name", "train", "--cwd", tmp_path, *options, "--", "sleep", "1000")
    assert done.returncode == 2
    assert words in done.stderr
    assert registry().look("train") is None


def test_a_job_that_gpucr_did_not_start_cannot_be_supervised(tmp_path: Path) -> None:
    done = command.run("supervise", os.getpid(), "--every", "10m", "--to", tmp_path / "store")
    assert done.returncode == 2
    assert "GPUCR-NO-JOB" in done.stderr
    done = command.run("supervise", "nobody", "--drain")
    assert "GPUCR-NOT-SUPERVISED" in done.stderr


def test_a_damaged_kept_record_is_reported(tmp_path: Path) -> None:
    jobs.run(tmp_path, "--", *jobs.counting(40), every="1h")
    jobs.wait_for_event("ended")
    (SupervisedFolder("train").path / "state.json").write_text("{")
    done = command.run("supervise", "--all")
    assert done.returncode == 1
    assert "state.json" in done.stderr
