"""`gpucr stop`, `kill`, `wait` and `jobs`, for jobs with a supervisor and without one."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import gpucr
from gpucr.batch.contract import _exit_code
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registered import registry
from gpucr.linux import processes
from gpucr.supervise.folder import SupervisedFolder
from gpucr.supervise.job import RegisteredJob
from tests import command
from tests.counter import wait_until
from tests.sandboxed import end_all_in, start_counter
from tests.supervise import jobs
from tests.supervise.jobs import own_state  # noqa: F401

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("own_state")]

_STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: print("heard TERM", flush=True))
signal.signal(signal.SIGUSR1, lambda *_: print("heard USR1", flush=True))
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("ready", flush=True)
while True:
    signal.pause()
"""


def _start(*arguments: str, isolate: bool = True, code: str | None = None) -> JobRecord:
    words = [sys.executable, "-I", "-S", "-u", "-c", code] if code is not None else list(arguments)
    return gpucr.run_job(words, name="train", isolate=isolate).record


def _wait_for_output(record: JobRecord, text: str) -> None:
    wait_until(lambda: record.log.exists() and text in record.log.read_text(), f"{text!r} in the log")


@pytest.mark.parametrize("isolate", [True, False])
def test_a_job_that_ignores_signals_is_stopped_with_all_its_processes(isolate: bool) -> None:
    record = _start(code=_STUBBORN, isolate=isolate)
    _wait_for_output(record, "ready")
    tree = [process.id for process in processes.tree(record.pid)]
    assert len(tree) == 2
    (ended,) = command.run_json("stop", "train", "--grace", "200ms")["jobs"]
    assert ended == {"job": "train", "state": "ended", "exit_code": None, "signal": signal.SIGKILL}
    assert "heard TERM" in record.log.read_text()
    assert not any(processes.is_alive(each) for each in tree)


@pytest.mark.criu
def test_a_supervisor_whose_parents_ignored_signals_hears_gpucr(tmp_path: Path) -> None:
    """A shell ignores SIGINT for what a script starts with `&`, and all that is started there inherits it."""
    store = str(tmp_path / "store")
    words = [sys.executable, "-m", "gpucr", "run", "--every", "1h", "--to", store, "--name", "train", "--"]
    script = ["sh", "-c", "trap '' TERM HUP; \"$@\" & wait $!", "sh"]
    subprocess.run([*script, *words, *jobs.counting(10**6)], check=True, timeout=60, cwd=tmp_path)
    supervisor = SupervisedFolder("train").running()
    assert supervisor is not None
    assert command.run("kill", "train").returncode == 0
    assert not processes.is_alive(supervisor)
    assert SupervisedFolder("train").state().phase == "stopped"


def test_a_job_that_ends_by_itself_is_not_killed() -> None:
    record = _start("sh", "-c", "trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done")
    _wait_for_output(record, "ready")
    assert command.run("stop", "train", "--grace", "60s").stdout == "train ended (exit code 7)\n"


def test_a_job_is_killed_at_once_or_sent_a_signal() -> None:
    record = _start(code=_STUBBORN)
    _wait_for_output(record, "ready")
    (sent,) = command.run_json("kill", "train", "--signal", "usr1")["jobs"]
    assert sent == {"job": "train", "pid": record.pid, "sent": "SIGUSR1"}
    _wait_for_output(record, "heard USR1")
    assert command.run("kill", "train").stdout == "train ended (SIGKILL)\n"
    assert "heard TERM" not in record.log.read_text()
    again = command.run("kill", "train")
    assert (again.returncode, "GPUCR-JOB-NOT-RUNNING" in again.stderr) == (2, True)
    assert command.run("kill", "train", "--signal", "nonsense").returncode == 2
    assert command.run("stop", "nobody").returncode == 2


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 5", 5), ("kill -9 $$", 137)])
def test_wait_ends_with_the_exit_code_of_the_job(script: str, code: int) -> None:
    _start("sh", "-c", script)
    assert command.run("wait", "train").returncode == code


def test_a_wait_times_out() -> None:
    _start("sleep", "1000")
    done = command.run("wait", "train", "--timeout", "100ms")
    assert done.returncode == gpucr.DeadlineExceeded.exit_code
    assert registry().find("train").state.word == "running"


@pytest.mark.criu
def test_waiting_continues_through_restarts_and_stops(tmp_path: Path) -> None:
    jobs.run(tmp_path, "--", *jobs.counting(60, stop_at=30))
    with command.start("wait", "train", "--json") as waiting:
        jobs.wait_for_event("checkpoint")
        jobs.kill_job()
        jobs.wait_for_event("restored")
        assert waiting.poll() is None
        (shown,) = command.run_json("jobs")["jobs"]
        assert shown["supervision"]["restarts"] == {"signal": 1}
        assert shown["supervision"]["supervisor_pid"] > 0
        assert shown["supervision"]["last_checkpoint"].startswith("20")
        table = command.run("jobs").stdout
        assert all(word in table for word in ("SNAPSHOT", "NEXT", "RESTARTS", "SUPERVISOR", " ago"))
        stopped = gpucr.stop_job("train")
        assert stopped.word == "ended"
        out, _ = waiting.communicate(timeout=command.TIMEOUT_S)
    assert command.parsed(out)["state"] == "ended"
    assert SupervisedFolder("train").state().phase == "stopped"
    assert command.run_json("supervise", "--all")["jobs"] == []
    command.run("jobs", "--forget", "train")
    assert not SupervisedFolder("train").exists()


@pytest.mark.criu
def test_a_list_shows_device_memory_and_the_snapshots_job(sim_only: None, tmp_path: Path) -> None:
    with start_counter(tmp_path, "--mib", "8", name="train") as counter:
        (shown,) = command.run_json("jobs")["jobs"]
        assert shown["held_bytes"] >= 8 << 20
        assert " GPU " in command.run("jobs").stdout
        store = tmp_path / "store"
        gpucr.init_store(store)
        gpucr.dump(counter.pid, f"{store}#a", leave_running=True)
        (listed,) = command.run_json("ls", store)["snapshots"]
        assert listed["job"] == "train"
        assert listed["command_line"][-1] == "8"
        assert len(listed["gpu_models"]) == 1
        assert listed["gpu_models"][0] in command.run("ls", store).stdout
    end_all_in(tmp_path)


def test_a_job_dumped_for_a_borrower_has_not_ended() -> None:
    record = _start("sleep", "600")
    processes.kill_and_wait([record.root])
    wait_until(lambda: registry().find("train").state.word == "ended", "the end")
    registry().update(record, dumped=True, lent=gpucr.Lent(("GPU-1",)))
    assert registry().find("train").state.word == "dumped"
    with pytest.raises(gpucr.DeadlineExceeded, match="made room"):
        gpucr.wait_job("train", timeout_s=0.01)
    assert RegisteredJob("train", gpucr.Supervision(store="/store"), None).look().word == "lent"
    registry().update(record, lent=None)
    assert gpucr.wait_job("train").word == "dumped"
    assert _exit_code("train", dumped=99) == 99


def test_a_lock_left_to_a_child_of_an_ended_supervisor_is_waited_for() -> None:
    folder = SupervisedFolder("train")
    folder.path.mkdir(parents=True, mode=0o700)
    locked, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with folder.held():
            locked.set()
            go_on.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert locked.wait(60)
    with pytest.raises(gpucr.InvalidRequest, match="has a supervisor already"):
        folder.remove()
    timer = threading.Timer(0.1, go_on.set)
    timer.start()
    folder.remove()
    holder.join()
    assert not folder.path.exists()
