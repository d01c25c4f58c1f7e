"""`gpucr run` and later commands: a job is started, listed, frozen and restored by its name, and its log is read."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.diagnosis.preflight.measured import Measurement
from gpucr.errors import DriverUnavailable, InvalidRequest, Unsupported
from gpucr.jobs import registered
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registry import Reservation
from gpucr.jobs.sandbox.started import StartedKeeper
from gpucr.linux import processes
from gpucr.operations import launch
from gpucr.sim import build as simulator
from tests import chroots, command
from tests.counter import wait_until
from tests.storm import later


@pytest.fixture(autouse=True)
def state(state_home: Path) -> Iterator[Path]:
    """A registry of this test's own, whose jobs are ended with it."""
    yield state_home / "gpucr" / "jobs"
    for job in registered.registry().jobs():
        if job.record is not None:
            _end(job.record)


def _end(record: JobRecord) -> None:
    ids = {record.root} | ({record.keeper} if record.keeper is not None else set())
    with contextlib.suppress(gpucr.ProcessNotFound):
        ids |= {process.id for process in processes.tree(record.root.pid)} if processes.is_alive(record.root) else set()
    processes.kill_and_wait(ids)


def _states() -> dict[str, str]:
    return {job.name: job.state.word for job in launch.list_jobs()}


def _wait_for_end(name: str) -> None:
    wait_until(lambda: _states()[name] != "running", f"the job {name} to end")


def _wait_for_the_next_second() -> None:
    """The second of its start is in the name of a log, by this clock: time() can be a tick behind others."""
    before = time.strftime("%S")
    wait_until(lambda: time.strftime("%S") != before, "the next second")


def _log(name: str) -> str:
    record = registered.registry().find(name).record
    assert record is not None
    return record.log.read_text()


def _python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def _run(*arguments: object, **changes: str) -> dict[str, Any]:
    return command.run_json_before("run", *arguments, env=changes)


# --- starting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", [pytest.param("--isolate", marks=pytest.mark.root), "--no-isolate"])
def test_a_job_runs_and_its_exit_status_is_kept(isolation: str, tmp_path: Path) -> None:
    printed = _run("--name", "short", isolation, "--cwd", tmp_path, "--", "sh", "-c", "pwd; echo oops >&2; exit 3")
    assert printed["isolated"] is (isolation == "--isolate")
    assert printed["network"] == ("own" if isolation == "--isolate" else "host")
    _wait_for_end("short")
    assert _log("short") == f"{tmp_path}\noops\n"
    (job,) = command.run_json("jobs", "--all")["jobs"]
    assert (job["name"], job["state"], job["exit_code"]) == ("short", "ended", 3)
    assert command.run_json("jobs")["jobs"] == []
    assert "ended (exit code 3)" in command.run("jobs", "--all").stdout


def test_a_job_ended_by_a_signal() -> None:
    launch.run_job(["sh", "-c", "kill -TERM $$"], name="killed", isolate=False)
    _wait_for_end("killed")
    assert registered.registry().find("killed").state.signal == signal.SIGTERM
    assert "ended (SIGTERM)" in command.run("jobs", "--all").stdout


def test_a_job_outlives_the_gpucr_that_started_it_and_its_session() -> None:
    with command.start("run", "--name", "long", "--no-isolate", "sleep", "1000") as gpucr_process:
        out, err = gpucr_process.communicate(timeout=command.TIMEOUT_S)
        assert gpucr_process.returncode == 0, err
        with contextlib.suppress(ProcessLookupError):
            os.killpg(gpucr_process.pid, signal.SIGKILL)
    record = registered.registry().find("long").record
    assert record is not None
    assert f"pid   {record.pid}" in out
    assert os.getsid(record.pid) == record.pid
    assert _states() == {"long": "running"}


def test_options_after_the_command_belong_to_the_command() -> None:
    for arguments in (["--", "echo", "--json", "-n", "x"], ["echo", "--json", "-n", "x"]):
        name = command.run_json_before("run", *arguments)["name"]
        assert name.startswith("echo-")
        _wait_for_end(name)
        assert _log(name) == "--json -n x\n"
    assert command.run("run", "--nonsense", "echo").returncode == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--name", "4711", "true"], "cannot be the name"),
        (["--name", "../x", "true"], "cannot be the name"),
        (["/no/such/program"], "is not a program that can be run"),
        (["no-such-program"], "there is no program 'no-such-program'"),
        (["--cwd", "/no/such/folder", "true"], "the folder /no/such/folder does not exist"),
        (["--log", "/no/such/folder/log", "true"], "the folder of the log"),
        (["--log", "/", "true"], "cannot be the log"),
        (["--no-isolate", "--network", "own", "true"], "only an isolated job has a network of its own"),
        pytest.param(["--log", "/dev/shm/x.log", "true"], "the log /dev/shm/x.log is in", marks=pytest.mark.root),
        pytest.param(["--cwd", "/dev/shm", "true"], "the folder /dev/shm is in", marks=pytest.mark.root),
        pytest.param(["--explain", "--cwd", "/dev/shm", "true"], "the folder /dev/shm is in", marks=pytest.mark.root),
    ],
)
def test_start_failures(options: list[str], said: str, state: Path) -> None:
    done = command.run("run", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert not state.exists() or list(state.iterdir()) == [], "nothing of it is left"


@pytest.mark.root
def test_a_program_in_shared_memory_needs_a_job_that_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as hidden:
        program, link = Path(hidden, "program"), tmp_path / "link"
        program.write_text("#!/bin/sh\npwd\n")
        program.chmod(0o755)
        link.symlink_to(program)
        for command_line in ([str(program)], [str(link)]):
            with pytest.raises(InvalidRequest, match=r"the program .+ is in /dev/shm") as caught:
                launch.run_job(command_line, name="job")
            assert "--no-isolate" in str(caught.value.hint)
        launch.run_job([str(program)], name="job", isolate=False, cwd=hidden, log=f"{hidden}/log")
        _wait_for_end("job")
        assert _log("job") == f"{hidden}\n"
        monkeypatch.setenv("XDG_STATE_HOME", hidden)
        with pytest.raises(InvalidRequest, match=r"the log .+ is in /dev/shm"):
            launch.run_job(["true"], name="job")
        assert launch.list_jobs() == ()


def test_a_program_that_cannot_be_executed_leaves_no_job(tmp_path: Path, state: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(InvalidRequest, match="cannot be run"):
        launch.run_job([str(script)], name="script", isolate=False)
    assert list(state.iterdir()) == []


def test_a_job_whose_record_cannot_be_written_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[JobRecord] = []

    def fail(_: object, record: JobRecord) -> None:
        seen.append(record)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpucr.jobs.registry.Reservation.register", fail)
    with pytest.raises(Unsupported, match="No space left"):
        launch.run_job(["touch", str(tmp_path / "ran")], isolate=False)
    (record,) = seen
    assert record.keeper is not None
    gone = (record.root, record.keeper)
    wait_until(lambda: not any(map(processes.is_alive, gone)), "the job's processes to end")
    assert not (tmp_path / "ran").exists()
    assert launch.list_jobs() == ()


def test_a_signal_before_the_program_runs_leaves_no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register = Reservation.register
    seen: list[JobRecord] = []

    def interrupted(reservation: Reservation, record: JobRecord) -> JobRecord:
        seen.append(register(reservation, record))
        signal.raise_signal(signal.SIGINT)
        return seen[0]

    monkeypatch.setattr(Reservation, "register", interrupted)
    with pytest.raises(gpucr.Interrupted, match="no job was started"):
        launch.run_job(["touch", str(tmp_path / "ran")], isolate=False)
    assert len(seen) == 1
    wait_until(lambda: not processes.is_alive(seen[0].root), "the first process to end")
    assert not (tmp_path / "ran").exists()
    assert launch.list_jobs() == ()


def test_a_signal_after_the_program_has_started_keeps_the_job_and_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job without a record cannot be found again, and "interrupted" would not be true."""
    send = StartedKeeper.send

    def send_and_interrupt(keeper: StartedKeeper, **message: object) -> None:
        send(keeper, **message)
        if "go" in message:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(StartedKeeper, "send", send_and_interrupt)
    record = launch.run_job(["sleep", "600"], name="begun", isolate=False).record
    assert processes.is_alive(record.root)
    assert _states() == {"begun": "running"}


def test_an_unusable_registry(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no folder")
    for arguments in (["run", "true"], ["jobs"], ["jobs", "--forget", "x"], ["logs", "x"], ["state", "x"]):
        done = command.run(*arguments)
        assert done.returncode == 3, done.stderr
        assert "error: the registry of jobs cannot be used" in done.stderr
    (tmp_path / "state").unlink()


def test_the_users_own_log(tmp_path: Path) -> None:
    log = tmp_path / "own.log"
    log.write_text("before\n")
    launch.run_job(["echo", "hi"], name="a", log=log, isolate=False)
    _wait_for_end("a")
    assert log.read_text() == "before\nhi\n"


def test_the_job_inherits_no_descriptors(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        launch.run_job(["sh", "-c", "ls -l /proc/self/fd"], name="fds", isolate=False)
    _wait_for_end("fds")
    assert "secret" not in _log("fds")
    assert "/dev/null" in _log("fds")


def test_the_job_has_the_chosen_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    started = launch.run_job(["env"], name="env", isolate=False, interpose=False)
    _wait_for_end("env")
    seen = dict(line.split("=", 1) for line in _log("env").splitlines() if "=" in line)
    assert seen["NCCL_P2P_DISABLE"] == "0"
    assert {name: seen[name] for name in started.record.environment} == dict(started.record.environment)
    assert "NCCL_P2P_DISABLE" not in started.record.environment
    assert started.record.environment["NCCL_CUMEM_ENABLE"] == "0"
    assert any("NCCL_P2P_DISABLE=0 is left as it is" in warning for warning in started.plan.warnings)
    assert "warning: NCCL_P2P_DISABLE=0" in command.run("run", "--no-interpose", "true").stderr


def _without_privileges(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `gpucr ARGUMENTS` without any capability. (Another user could not always read this Python.)"""
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    return subprocess.run(
        [*drop, *command.command(*arguments)], capture_output=True, text=True, timeout=command.TIMEOUT_S, check=False
    )


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="there is no setpriv")
def test_without_privileges_a_job_is_not_isolated_and_that_is_reported() -> None:
    refused = _without_privileges("run", "--isolate", "true")
    assert refused.returncode == 2
    assert "need CAP_SYS_ADMIN" in refused.stderr

    done = _without_privileges("run", "--name", "mine", "sh", "-c", "grep Seccomp: /proc/self/status; echo $USE_LIBUV")
    assert done.returncode == 0, done.stderr
    assert "not isolated: namespaces of a job's own need CAP_SYS_ADMIN" in done.stderr
    _wait_for_end("mine")
    assert _log("mine").split() == ["Seccomp:", "0", "0"]
    (job,) = launch.list_jobs()
    assert job.record is not None
    assert (job.record.isolated, job.record.io_uring_is_refused, job.record.network) == (False, False, "host")
    assert job.state.exit_code == 0


@pytest.mark.root
def test_io_uring_is_denied() -> None:
    launch.run_job(["grep", "Seccomp:", "/proc/self/status"], name="filtered", isolate=False)
    _wait_for_end("filtered")
    assert _log("filtered").split() == ["Seccomp:", "2"]


# --- explaining ------------------------------------------------------------------------------------------------


def test_explain_starts_nothing_and_gives_reasons(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    done = command.run("run", "--explain", "--no-interpose", "--", "sleep", "1000")
    assert done.returncode == 0, done.stderr
    assert "set         NCCL_P2P_DISABLE=1: NCCL must not use memory of another GPU" in done.stdout
    assert "left alone  NCCL_CUMEM_ENABLE=1 (gpucr would set 0)" in done.stdout
    assert "warning: NCCL_CUMEM_ENABLE=1 is left as it is" in done.stderr
    assert not state.exists()
    plan = command.run_json_before("run", "--explain", "--no-interpose", "sleep", "1000")
    assert plan["schema"] == "gpucr.run.plan"
    assert plan["program"] == shutil.which("sleep")
    by_name = {change["variable"]: change for change in plan["environment_changes"]}
    assert by_name["NCCL_CUMEM_ENABLE"]["given"] == "1"
    assert all(change["reason"] for change in by_name.values())


def test_a_job_on_several_nodes_has_the_machines_network() -> None:
    done = command.run("run", "--explain", "--", "sleep", "1000", env={"SLURM_NNODES": "2"})
    assert done.returncode == 0, done.stderr
    assert "nodes       several (SLURM_NNODES=2): this is one part, see gpucr nodes" in done.stdout
    assert "network     the machine’s" in done.stdout
    assert "set         NCCL_NET=Socket: NCCL must talk to other nodes over TCP" in done.stdout


def test_measurements_override_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    comes_back = Measurement(True, "comes back", "2026-01-02")
    monkeypatch.setattr(launch, "measurements", lambda _: {"peer_access": comes_back, "legacy_ipc": comes_back})
    chosen = {change.variable for change in launch.plan_job(["true"], interpose=False).environment}
    assert "NCCL_P2P_DISABLE" not in chosen
    assert "NCCL_CUMEM_ENABLE" in chosen


def test_without_a_driver_no_nccl_settings_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise DriverUnavailable("there is none")

    monkeypatch.setattr(launch, "load_driver", no_driver)
    monkeypatch.setattr(launch, "driver_version", lambda: None)
    assert {change.variable for change in launch.plan_job(["true"]).environment} <= {"USE_LIBUV"}


# --- names instead of pids --------------------------------------------------------------------------------


@pytest.fixture
def counter() -> Callable[..., JobRecord]:
    """Start the counter program as a job, and wait until it is ready."""

    def start(name: str, *arguments: str, isolate: bool = False) -> JobRecord:
        program = str(simulator.build() / "counter")
        started = launch.run_job([program, "--port", "0", *arguments], name=name, isolate=isolate)
        wait_until(lambda: "ready" in _log(name), "the counter to become ready")
        return started.record

    return start


def test_a_name_stands_for_the_pid(counter: Callable[..., JobRecord]) -> None:
    record = counter("count", "--mib", "1")
    assert [each["pid"] for each in command.run_json("state", "count")["processes"]] == [record.pid]
    assert command.run_json("suspend", "count")["pid"] == record.pid
    assert _states() == {"count": "suspended"}
    assert command.run_json("resume", "count")["pid"] == record.pid
    assert _states() == {"count": "running"}
    (state_now,) = gpucr.job_states("count")
    assert state_now.process.pid == record.pid


@pytest.mark.parametrize("arguments", [["state"], ["suspend"], ["resume"], ["dump", "--to", "x"], ["exec"]])
def test_an_unknown_name(arguments: list[str], counter: Callable[..., JobRecord]) -> None:
    counter("count")
    name, *options = arguments
    done = command.run(name, *options, "coutn", *(["true"] if name == "exec" else []))
    assert done.returncode == 2
    assert "error: there is no job 'coutn'" in done.stderr
    assert "hint:  did you mean count?" in done.stderr


def test_neither_a_pid_nor_a_name() -> None:
    done = command.run("state", "A+b")
    assert done.returncode == 2
    assert "neither a pid nor the name of a job" in done.stderr


def test_the_name_of_an_ended_job() -> None:
    launch.run_job(["true"], name="gone", isolate=False)
    _wait_for_end("gone")
    with pytest.raises(InvalidRequest, match="the job gone does not run any more") as caught:
        gpucr.suspend("gone")
    assert caught.value.hint == "`gpucr logs gone` shows its last output"


def test_forgetting_and_reusing_a_name() -> None:
    launch.run_job(["sleep", "1000"], name="again", isolate=False)
    done = command.run("run", "--name", "again", "true")
    assert done.returncode == 2
    assert "the job again is running: its name is taken" in done.stderr
    assert command.run("jobs", "--forget", "again").returncode == 2
    record = registered.registry().find("again").record
    assert record is not None
    _end(record)
    _wait_for_end("again")
    assert command.run("run", "--name", "again", "true").returncode == 0
    _wait_for_end("again")
    done = command.run("jobs", "--forget", "again")
    assert (done.returncode, done.stdout) == (0, "again forgotten (ended (exit code 0))\n")
    assert _states() == {}


def test_forgetting_several_is_all_or_nothing() -> None:
    for name in ("a", "b"):
        launch.run_job(["true"], name=name, isolate=False)
        _wait_for_end(name)
    done = command.run("jobs", "--forget", "a", "--forget", "nosuch", "--forget", "b")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no job 'nosuch'" in done.stderr
    assert set(_states()) == {"a", "b"}
    done = command.run("jobs", "--forget", "a", "--forget", "b")
    assert done.stdout == "a forgotten (ended (exit code 0))\nb forgotten (ended (exit code 0))\n"
    assert _states() == {}


def test_a_missing_snapshot_is_reported(tmp_path: Path) -> None:
    launch.run_job(["true"], name="job", isolate=False)
    _wait_for_end("job")
    record = registered.registry().find("job").record
    assert record is not None
    Path(record.status_path).unlink()
    snapshot = tmp_path / "snapshot"
    registered.registry().update(record, snapshot=str(snapshot), dumped=True)
    assert "which is gone" in command.run("jobs").stdout
    assert command.run_json("jobs")["jobs"][0]["snapshot_is_gone"] is True
    done = command.run("suspend", "job")
    assert f"was dumped to {snapshot}, which no longer exists" in done.stderr
    assert "gpucr restore" not in done.stderr
    done = command.run("run", "--name", "job", "--", "true")
    assert f"its snapshot {snapshot} is gone" in done.stderr
    assert "gpucr restore" not in done.stderr
    snapshot.mkdir()
    (snapshot / "manifest.json").touch()
    assert "which is gone" not in command.run("jobs").stdout
    assert command.run_json("jobs")["jobs"][0]["snapshot_is_gone"] is False
    done = command.run("jobs", "--forget", "job")
    assert done.stdout.endswith(f"; its log is kept for a restore: {record.log_path}\n")


@pytest.mark.parametrize("text", ["sleep 5", "sleep 'x", b"sleep 5"])
def test_a_command_as_a_single_string(text: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"the command is one text, .*where a list of words is needed") as caught:
        gpucr.run_job(text)
    assert "['sleep'," in str(caught.value.hint)
    with pytest.raises(InvalidRequest, match="5 in the command is not a text"):
        gpucr.run_job(["sleep", 5])  # type: ignore[list-item]


def test_forgetting_with_force_and_damaged_records(state: Path) -> None:
    """As when the container that it was started in no longer exists."""
    launch.run_job(["true"], name="job", isolate=False)
    _wait_for_end("job")
    record = registered.registry().find("job").record
    assert record is not None
    Path(record.status_path).unlink()
    registered.registry().update(record, boot_id="another", host="node7")
    done = command.run("jobs", "--forget", "job")
    assert (done.returncode, done.stdout) == (2, "")
    assert "`gpucr jobs --forget job --force`" in done.stderr
    done = command.run("jobs", "--forget", "job", "--force")
    assert (done.returncode, done.stdout) == (0, "job forgotten (elsewhere (node7))\n")
    assert command.run("jobs", "--force").returncode == 2
    launch.run_job(["true"], name="job", isolate=False)
    (state / "job" / "record.json").write_text("{")
    assert "its logs are kept" in command.run("jobs", "--forget", "job").stdout
    assert list((state / "job").glob("*.log"))


# --- logs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lines", "expected"),
    [
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("a\nb\n", 9, "a\nb\n"),
        ("a\n\n\n", 2, "\n\n"),
        ("a\n", 0, ""),
        ("", 3, ""),
        ("x" * 70_000 + "\n" + "y" * 70_000 + "\nz\n", 2, "y" * 70_000 + "\nz\n"),
    ],
)
def test_the_last_lines(text: str, lines: int, expected: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    launch.run_job(["true"], name="a", log=log, isolate=False)
    _wait_for_end("a")
    log.write_text(text)
    assert command.run("logs", "-n", lines, "a").stdout == expected


def test_following_a_log_until_the_job_ends(tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"echo one; until [ -e {go} ]; do sleep 0.01; done; echo two"
    launch.run_job(["sh", "-c", wait], name="talk", isolate=False)
    with command.start("logs", "--follow", "talk") as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "one\n"
        go.touch()
        assert follower.stdout.read() == "two\n"
        assert follower.wait(command.TIMEOUT_S) == 0
    assert follower.returncode == 0


def test_a_removed_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    launch.run_job(["true"], name="a", log=log, isolate=False)
    _wait_for_end("a")
    log.unlink()
    done = command.run("logs", "a")
    assert done.returncode == 2
    assert "cannot be read" in done.stderr


# --- exec ------------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_exec_sees_the_jobs_namespaces(tmp_path: Path) -> None:
    serve = (
        "import os, socket; s = socket.create_server(('127.0.0.1', 7411))\n"
        "open('/dev/shm/mine', 'w').write('private')\n"
        "print('ready', os.getpid(), flush=True)\n"
        "while True: s.accept()[0].sendall(b'from inside')"
    )
    launch.run_job(_python(serve), name="serve", isolate=True)
    wait_until(lambda: "ready" in _log("serve"), "the server")
    inner_pid = _log("serve").split()[1]
    ask = "import socket; print(socket.create_connection(('127.0.0.1', 7411)).recv(100).decode())"
    assert command.run("exec", "serve", "--", *_python(ask)).stdout == "from inside\n"
    record = registered.registry().find("serve").record
    assert record is not None
    shown = command.run("exec", record.pid, "sh", "-c", "cat /dev/shm/mine; ls /proc")
    assert shown.stdout.startswith("private")
    assert inner_pid in shown.stdout.split()
    assert not Path("/dev/shm/mine").exists()


@pytest.mark.root
def test_exec_sees_the_root_folder_of_the_job(tmp_path: Path) -> None:
    """Also of one that was not started by gpucr, in the machine's own namespaces."""
    asked = """
        touch "$ROOT/of-the-job"
        mkfifo "$ROOT/runs"
        chroot "$ROOT" sh -c 'echo >/runs; exec sleep 600' &
        read line <"$ROOT/runs"
        gpucr exec $! -- sh -c "ls /of-the-job; pwd"
        kill $!
    """
    done = chroots.run(asked, tmp_path / "root", "folder")
    assert (done.stdout, done.stderr) == (f"/of-the-job\n{os.getcwd()}\n", "")


@pytest.mark.root
def test_exec_in_a_folder_the_job_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    launch.run_job(["sleep", "600"], name="inside", isolate=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.chdir(folder)
        done = command.run("exec", "inside", "true")
    assert done.returncode == 2
    assert f"the current folder {folder} cannot be used inside the job" in done.stderr


def test_exec_passes_on_exit_code_and_input() -> None:
    assert command.run("exec", os.getpid(), "sh", "-c", "exit 7").returncode == 7
    assert command.run("exec", os.getpid(), "sh", "-c", "kill -KILL $$").returncode == 128 + 9
    for program, code, reason in (
        ("no-such-program", 127, "No such file or directory"),
        ("/no/such/program", 127, "No such file or directory"),
        ("/etc/passwd", 126, "Permission denied"),
        ("/usr", 126, "Permission denied"),
    ):
        done = command.run("exec", os.getpid(), "--", program)
        error, hint, name = done.stderr.splitlines()
        assert (done.returncode, error) == (code, f"error: {program} cannot be run: {reason}")
        assert (hint[:7], name) == ("hint:  ", "code:  GPUCR-NO-PROGRAM")
    typed = subprocess.run(
        command.command("exec", os.getpid(), "cat"),
        input="typed",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert typed.stdout == "typed"


# --- dump and restore ------------------------------------------------------------------------------------------


@pytest.mark.criu
@pytest.mark.parametrize("isolate", [later(False), True])
def test_a_job_keeps_its_name_and_its_log_through_a_dump_and_a_restore(isolate: bool, tmp_path: Path) -> None:
    beat = "import itertools, time\nfor n in itertools.count():\n    print(n, flush=True); time.sleep(0.005)"
    before = launch.run_job(_python(beat), name="beat", isolate=isolate).record
    wait_until(lambda: "10" in _log("beat").split(), "the job to count")
    snapshot = tmp_path / "snapshot"

    gpucr.dump("beat", snapshot, leave_running=True)
    record = registered.registry().find("beat").record
    assert record is not None
    assert (record.snapshot, record.dumped) == (str(snapshot), False)
    shutil.rmtree(snapshot)

    gpucr.dump("beat", snapshot)
    (job,) = launch.list_jobs()
    assert job.state.word == "dumped"
    assert f"dumped ({snapshot})" in command.run("jobs").stdout
    with pytest.raises(InvalidRequest, match=f"the job beat was dumped to {snapshot}"):
        gpucr.job_states("beat")
    manifest = gpucr.Snapshot.open(snapshot).manifest
    assert manifest.launch is not None
    assert (manifest.launch.name, manifest.launch.log_path) == ("beat", before.log_path)
    printed = len(_log("beat").split())

    report = gpucr.restore(snapshot)
    assert report.name == "beat"
    assert _states() == {"beat": "running"}
    wait_until(lambda: len(_log("beat").split()) > printed, "the job to continue with its log")
    numbers = [int(line) for line in _log("beat").splitlines(keepends=True) if line.endswith("\n")]
    assert numbers == list(range(len(numbers)))
    after = registered.registry().find("beat").record
    assert after is not None
    assert (after.pid, after.log_path) == (report.pid, before.log_path)


@pytest.mark.criu
def test_a_restored_job_gets_another_name_if_its_own_is_taken(tmp_path: Path) -> None:
    launch.run_job(["sleep", "1000"], name="job", isolate=False)
    gpucr.dump("job", tmp_path / "snapshot")
    launch.forget_job("job")
    launch.run_job(["sleep", "1000"], name="job", isolate=False)
    assert gpucr.restore(tmp_path / "snapshot").name == "job-2"
    assert _states() == {"job": "running", "job-2": "running"}


@pytest.mark.criu
def test_a_restored_job_leaves_another_dumped_jobs_name_alone(tmp_path: Path) -> None:
    for month in ("january", "february"):
        launch.run_job(["sh", "-c", f"echo {month}; exec sleep 1000"], name="job", isolate=False)
        wait_until(lambda: bool(_log("job")), "the job to say something")
        gpucr.dump("job", tmp_path / month)
        if month == "january":
            launch.forget_job("job")
            _wait_for_the_next_second()
    assert gpucr.restore(tmp_path / "january").name == "job-2"
    assert _states() == {"job": "dumped", "job-2": "running"}
    record = registered.registry().find("job-2").record
    assert record is not None
    _end(record)
    _wait_for_end("job-2")
    launch.forget_job("job-2")
    assert gpucr.restore(tmp_path / "february").name == "job"
    assert _log("job") == "february\n"


@pytest.mark.criu
def test_a_job_with_another_name_keeps_its_log_when_the_old_one_is_forgotten(tmp_path: Path) -> None:
    beat = "import itertools, time\nfor n in itertools.count():\n    print(n, flush=True); time.sleep(0.005)"
    launch.run_job(_python(beat), name="job", isolate=False)
    gpucr.dump("job", tmp_path / "snapshot")
    report = gpucr.restore(tmp_path / "snapshot", name="other")
    assert (report.name, report.warnings) == ("other", ())
    launch.forget_job("job")
    assert _states() == {"other": "running"}
    printed = len(_log("other").split())
    wait_until(lambda: len(_log("other").split()) > printed, "the job to continue with its log")


@pytest.mark.criu
@pytest.mark.parametrize("before_the_dump", [True, False])
def test_a_restored_job_whose_log_was_removed(before_the_dump: bool, tmp_path: Path) -> None:
    beat = "import time\nwhile True: print(1, flush=True); time.sleep(0.005)"
    log = launch.run_job(_python(beat), name="job").record.log
    wait_until(lambda: bool(_log("job")), "the job to say something")
    if before_the_dump:
        log.unlink()
    gpucr.dump("job", tmp_path / "snapshot")
    log.unlink(missing_ok=True)
    report = gpucr.restore(tmp_path / "snapshot")
    said = " ".join(report.warnings)
    assert ("had been removed when it was dumped" in said) is before_the_dump, said


@pytest.mark.criu
def test_an_unusable_registry_does_not_stop_a_restore(tmp_path: Path, state: Path) -> None:
    launch.run_job(["sleep", "1000"], name="job", isolate=False, log=tmp_path / "log")
    gpucr.dump("job", tmp_path / "snapshot")
    state.rename(state.with_name("away"))  # the keeper may be about to write there how the job ended
    state.write_text("no folder")
    report = gpucr.restore(tmp_path / "snapshot")
    try:
        assert report.name is None
        assert any("will not be in the registry" in warning for warning in report.warnings)
    finally:
        processes.kill_tree(report.pid, including_root=True)
        state.unlink()
