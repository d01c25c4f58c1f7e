"""The main job: a live process tree goes to disk and comes back. With real CRIU."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.criu.engine import Criu
from gpucr.driver.cuda import CudaDriver
from gpucr.driver.gpus import gpu_processes, list_gpus
from gpucr.linux import processes
from gpucr.model import CudaState
from gpucr.snapshot.folder import MANIFEST_NAME
from gpucr.undo.events import Progress
from tests import command
from tests.counter import Counter, CounterFactory, wait_until
from tests.storm import later

pytestmark = pytest.mark.criu
RUNNING, LOCKED, CHECKPOINTED = CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED


def dump_and_end(job: Counter, to: Path, **options: Any) -> gpucr.DumpReport:
    report = gpucr.dump(job.pid, to, **options)
    job.reap()
    return report


def child_of(job: Counter) -> int:
    return next(pid for pid in job.processes() if pid != job.pid)


def test_a_job_is_dumped_to_disk_and_restored(counter: CounterFactory, driver: CudaDriver, tmp_path: Path) -> None:
    job = counter("--mib", "32")
    assert job.ask() == 101
    report = dump_and_end(job, tmp_path / "s")
    assert not job.processes()
    assert job.pid not in {use.pid for use in gpu_processes()}
    assert [phase.name for phase in report.phases] == [
        "prepare", "allocate", "lock", "checkpoint", "detach", "stop", "dump",
    ]  # fmt: skip
    assert report.size_bytes > 32 << 20
    restored = gpucr.restore(tmp_path / "s")
    assert restored.pid == job.pid
    assert [phase.name for phase in restored.phases] == [
        "load", "verify", "keeper", "criu", "hold", "restore", "unlock", "release", "keep",
    ]  # fmt: skip
    assert job.ask() == 102
    assert job.send("verify") == "ok"


def test_the_snapshot_is_private_and_describes_its_contents(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "8")
    old_umask = os.umask(0)
    try:
        dump_and_end(job, tmp_path / "s")
    finally:
        os.umask(old_umask)
    for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    manifest = gpucr.Snapshot.open(tmp_path / "s").manifest
    (process,) = manifest.processes
    assert (process.pid, process.found_state, process.name) == (job.pid, RUNNING, "counter")
    assert sum(process.device_bytes.values()) >= 8 << 20
    assert process.device_data is not None
    assert process.device_data.stored_bytes >= 8 << 20
    assert not process.staging
    assert [gpu.uuid for gpu in manifest.gpus] == [gpu.uuid for gpu in list_gpus()]
    listed = {file.path for file in manifest.files}
    assert listed == {f"images/{path.name}" for path in (tmp_path / "s" / "images").iterdir()}
    assert sum(file.size_bytes for file in manifest.files) < 32 << 20


@pytest.mark.by_user
def test_leave_running_keeps_the_job_and_a_restorable_snapshot(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "8")
    report = gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    assert report.left_running
    assert [p.name for p in report.phases] == [
        "prepare", "allocate", "lock", "checkpoint", "detach", "stop", "dump",
        "hold", "attach", "restore", "unlock", "release", "save",
    ]  # fmt: skip
    assert job.ask() == 101
    assert job.ask() == 102
    job.kill()
    gpucr.restore(tmp_path / "s")
    assert job.ask() == 101
    assert job.send("verify") == "ok"


@pytest.mark.by_user
def test_a_snapshot_restores_more_than_once(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter()
    dump_and_end(job, tmp_path / "s")
    for _ in range(2):
        gpucr.restore(tmp_path / "s")
        assert job.ask() == 101
        job.kill()


@pytest.mark.by_user
def test_a_tree_with_and_without_cuda_processes(counter: CounterFactory, driver: CudaDriver, tmp_path: Path) -> None:
    job = counter("--fork", "2")
    pids = job.processes()
    dump_and_end(job, tmp_path / "s")
    gpucr.restore(tmp_path / "s")
    assert job.processes() == pids
    assert {driver.state(pid) for pid in pids} == {RUNNING}
    assert job.ask() == 101


@pytest.mark.parametrize(
    ("found", "leave_running"),
    [(LOCKED, False), (CHECKPOINTED, True), later(LOCKED, True), later(CHECKPOINTED, False)],
)
def test_a_checkpointed_state_survives_dump_and_restore_and_a_lock_does_not(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, found: CudaState, leave_running: bool
) -> None:
    job = counter("--fork", "1")
    child = child_of(job)
    driver.lock(child, 5000)
    if found is CHECKPOINTED:
        driver.checkpoint(child)
    report = gpucr.dump(job.pid, tmp_path / "s", leave_running=leave_running)
    assert any(f"process {child} is locked" in each for each in report.warnings) == (found is LOCKED)
    if leave_running:
        assert (driver.state(job.pid), driver.state(child)) == (RUNNING, found)
        job.kill()
    else:
        job.reap()
    gpucr.restore(tmp_path / "s")
    lasting = RUNNING if found is LOCKED else found
    assert (driver.state(job.pid), driver.state(child)) == (RUNNING, lasting)
    gpucr.resume(job.pid)
    assert driver.state(child) is RUNNING


def test_a_tree_without_cuda_needs_no_gpu_no_driver_and_no_libcuda(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--no-cuda")
    nowhere = {"LD_LIBRARY_PATH": str(tmp_path / "nothing")}
    dumped = command.run_json("dump", job.pid, "--to", tmp_path / "s", env=nowhere)
    job.reap()
    assert [phase["name"] for phase in dumped["phases"]] == ["prepare", "dump"]
    inspected = command.run_json("inspect", tmp_path / "s", "--verify", env=nowhere)
    assert inspected["has_gpu_state"] is False
    assert inspected["manifest"]["gpus"] == []
    restored = command.run_json("restore", tmp_path / "s", env=nowhere)
    assert [phase["name"] for phase in restored["phases"]] == ["verify", "keeper", "criu", "keep"]
    assert job.ask() == 101


def test_gpu_state_is_refused_without_a_matching_gpu(
    counter: CounterFactory, sim_environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    job = counter("--mib", "8")
    dump_and_end(job, tmp_path / "s")
    without_driver = command.run("restore", tmp_path / "s", env={"LD_LIBRARY_PATH": str(tmp_path)})
    assert without_driver.returncode == 3, without_driver.stderr
    assert "this machine has no GPU" in without_driver.stderr
    elsewhere = command.run("restore", tmp_path / "s", env={**sim_environment(), "GPUCR_SIM_MACHINE": "another"})
    assert elsewhere.returncode == 3, elsewhere.stderr
    assert "the snapshot needs GPU" in elsewhere.stderr
    assert "--gpu-map" in elsewhere.stderr
    assert not job.processes()


def test_a_job_moves_to_another_machine_with_a_gpu_map(
    counter: CounterFactory, sim_environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    job = counter("--mib", "8")
    old = [gpu.uuid for gpu in list_gpus()]
    dump_and_end(job, tmp_path / "s")
    there = {**sim_environment(), "GPUCR_SIM_MACHINE": "another"}
    # The list of GPUs of the other machine, as that machine's own commands see it.
    listed = command.run("restore", tmp_path / "s", env=there).stderr
    new = [word.strip("(,") for word in listed.split() if word.strip("(,").startswith("GPU-")]
    new = [uuid for uuid in dict.fromkeys(new) if uuid not in old]
    assert len(new) == 2
    gpu_map = ",".join(f"{a}={b}" for a, b in zip(old, new, strict=True))
    command.run_json("restore", tmp_path / "s", "--gpu-map", gpu_map, env=there)
    assert job.ask() == 101
    assert job.send("verify") == "ok"


def test_a_dry_run_reports_the_plan_and_does_nothing(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path
) -> None:
    job = counter()
    plan = command.run_json("dump", job.pid, "--to", tmp_path / "s", "--dry-run", "--leave-running")
    assert [step.split()[0] for step in plan["steps"]] == [
        "make", "allocate", "lock", "checkpoint", "take", "stop", "dump",
        "hold", "put", "restore", "unlock", "release", "save",
    ]  # fmt: skip
    assert not (tmp_path / "s").exists()
    assert driver.state(job.pid) is RUNNING


def test_a_process_that_starts_cuda_before_the_freeze_makes_the_dump_retry(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--cuda-after", str(tmp_path / "start"))
    calls: list[int] = []
    real_dump = Criu.dump

    def dump_after_cuda_started(self: Criu, pid: int, *args: Any, **kwargs: Any) -> None:
        calls.append(pid)
        if len(calls) == 1:
            (tmp_path / "start").touch()
            wait_until(lambda: job.ask() > 0 and driver.state(pid) is RUNNING, "the job to use CUDA")
        real_dump(self, pid, *args, **kwargs)

    monkeypatch.setattr(Criu, "dump", dump_after_cuda_started)
    report = dump_and_end(job, tmp_path / "s")
    assert len(calls) == 2
    assert report.snapshot.manifest.has_gpu_state
    gpucr.restore(tmp_path / "s")
    assert job.ask() > 101


def test_a_criu_error_with_another_cause_is_not_retried(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter()
    calls: list[int] = []

    def fail(self: Criu, pid: int, *args: Any, **kwargs: Any) -> None:
        calls.append(pid)
        raise gpucr.CriuError("CRIU could not dump the job: a socket", phase="dump")

    monkeypatch.setattr(Criu, "dump", fail)
    with pytest.raises(gpucr.CriuError, match="a socket"):
        gpucr.dump(job.pid, tmp_path / "s")
    assert calls == [job.pid]
    assert driver.state(job.pid) is RUNNING
    assert not (tmp_path / "s").exists()


def test_the_commit_comes_before_the_kill(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter()

    def no_space(path: Path, *args: object, **options: object) -> None:
        assert path.name == MANIFEST_NAME
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr("gpucr.linux.durable.write", no_space)
    with pytest.raises(gpucr.SnapshotError, match="could not be completed: No space left on device"):
        gpucr.dump(job.pid, tmp_path / "s")
    assert driver.state(job.pid) is RUNNING
    assert job.ask() == 101
    assert not (tmp_path / "s").exists()


@pytest.mark.by_user
@pytest.mark.parametrize("action", ["lock", later("checkpoint"), later("restore"), "unlock"])
def test_a_failing_driver_leaves_the_job_unchanged(
    sim_only: None,
    counter: CounterFactory,
    driver: CudaDriver,
    tmp_path: Path,
    sim_environment: Callable[..., dict[str, str]],
    action: str,
) -> None:
    job = counter("--fork", "1", env=sim_environment(faults=f"{action}#1=999"))
    (tmp_path / "s").mkdir()
    with pytest.raises(gpucr.DriverError, match="999"):
        gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    assert {driver.state(pid) for pid in job.processes()} == {RUNNING}
    assert job.ask() == 101
    assert list((tmp_path / "s").iterdir()) == []


@pytest.mark.parametrize("action", [later("restore"), "unlock"])
def test_a_failed_restore_ends_the_processes_and_keeps_the_snapshot(
    sim_only: None, counter: CounterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    job = counter("--fork", "1")
    child = child_of(job)
    dump_and_end(job, tmp_path / "s")
    monkeypatch.setenv("GPUCR_SIM_CALLER_FAULTS", f"{action}@{child}=999")
    with pytest.raises(gpucr.DriverError, match="999"):
        gpucr.restore(tmp_path / "s")
    assert not job.processes()
    monkeypatch.delenv("GPUCR_SIM_CALLER_FAULTS")
    gpucr.restore(tmp_path / "s")
    assert job.ask() == 101


def test_the_job_ends_during_a_dump(
    sim_only: None,
    counter: CounterFactory,
    driver: CudaDriver,
    tmp_path: Path,
    sim_environment: Callable[..., dict[str, str]],
) -> None:
    job = counter("--fork", "1", env=sim_environment(faults=f"checkpoint=until:{tmp_path / 'go'}"))
    child = child_of(job)

    def kill_in_checkpoint(progress: Progress) -> None:
        if (progress.event, progress.phase) == ("advance", "checkpoint") and not (tmp_path / "go").exists():
            os.kill(child, signal.SIGKILL)
            (tmp_path / "go").touch()

    with pytest.raises(gpucr.JobDamaged, match=f"process {child} ended during the checkpoint") as failure:
        gpucr.dump(job.pid, tmp_path / "s", on_progress=kill_in_checkpoint)
    (lost,) = failure.value.failures
    assert lost.startswith(f"process {child} (")
    assert driver.state(job.pid) is RUNNING
    assert job.ask() == 101
    assert not (tmp_path / "s").exists()


def test_the_deadline_passes_during_a_dump(
    sim_only: None,
    counter: CounterFactory,
    driver: CudaDriver,
    tmp_path: Path,
    sim_environment: Callable[..., dict[str, str]],
) -> None:
    job = counter(env=sim_environment(faults="checkpoint=delay:1000"))
    with pytest.raises(gpucr.DeadlineExceeded):
        gpucr.dump(job.pid, tmp_path / "s", timeout_s=0.5)
    assert driver.state(job.pid) is RUNNING
    assert job.ask() == 101
    assert not (tmp_path / "s").exists()


def test_ctrl_c_while_criu_dumps(counter: CounterFactory, driver: CudaDriver, tmp_path: Path) -> None:
    job = counter("--mib", "64")  # a machine of 1 GiB has the room
    process = command.start("dump", job.pid, "--to", tmp_path / "s")
    assert process.stderr is not None
    while "with CRIU" not in process.stderr.readline():
        assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=command.TIMEOUT_S)
    if process.returncode == 0:  # the dump had been committed before the signal came
        job.reap()
        gpucr.restore(tmp_path / "s")
    else:
        assert process.returncode == 130, err
        assert not (tmp_path / "s").exists()
    assert driver.state(job.pid) is RUNNING
    assert job.ask() == 101
    assert job.send("verify") == "ok"


def test_json_of_dump_and_restore(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "8")
    dumped = command.run_json("dump", job.pid, "--to", tmp_path / "s", "--leave-running")
    assert (dumped["schema"], dumped["schema_version"]) == ("gpucr.dump", 1)
    assert dumped["pid"] == job.pid
    assert dumped["size_bytes"] > 8 << 20
    assert 0 < dumped["downtime_s"] <= sum(phase["seconds"] for phase in dumped["phases"])
    assert all(set(phase) == {"name", "seconds", "size_bytes"} for phase in dumped["phases"])
    job.kill()
    restored = command.run_json("restore", tmp_path / "s")
    assert (restored["schema"], restored["pid"], restored["process_count"]) == ("gpucr.restore", job.pid, 1)
    assert job.ask() == 101


@pytest.mark.by_user
def test_output_of_the_commands(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "8")
    listed = command.run("ps")
    assert any(line.split()[:3] == [str(job.pid), str(job.pid), "running"] for line in listed.stdout.splitlines())
    assert command.run("state", job.pid).stdout == f"{job.pid} running counter\n"
    assert command.run("suspend", job.pid).stdout == f"{job.pid} checkpointed (was running)\n"
    record = command.run_json("state", job.pid)["processes"][0]
    assert (record["pid"], record["state"]) == (job.pid, "checkpointed")
    assert command.run("resume", job.pid).stdout == f"{job.pid} running (was checkpointed)\n"
    dumped = command.run("dump", job.pid, "--to", tmp_path / "s", "--leave-running")
    assert dumped.stdout.splitlines()[0] == f"{tmp_path / 's'}: job {job.pid} dumped; it keeps running"
    shown = command.run("inspect", tmp_path / "s", "--verify").stdout
    assert "every file matches its digests" in shown
    assert f"└─ {job.pid} (running" in shown or f"├─ {job.pid} (running" in shown
    assert json.loads(command.run("inspect", tmp_path / "s", "--json").stdout)["manifest"]["root_pid"] == job.pid


ECHO = """
import socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.bind(sys.argv[1])
    server.listen()
    while True:
        with server.accept()[0] as peer:
            peer.sendall(b"here")
"""


def test_a_sockets_removed_folder_is_recreated(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    folder.chmod(0o750)
    path = folder / "socket"
    job = start_echo(path, tmp_path)
    pid = job.pid
    try:
        wait_until(lambda: answers(path), "the job to answer")
        gpucr.dump(pid, tmp_path / "s", leave_running=True)
        assert answers(path)
        job.kill()
        job.wait()
        shutil.rmtree(tmp_path / "a")
        (tmp_path / "a").write_text("in the way")
        with pytest.raises(gpucr.Unsupported, match="cannot be used: Not a directory"):
            gpucr.restore(tmp_path / "s")
        (tmp_path / "a").unlink()
        pid = gpucr.restore(tmp_path / "s").pid
        assert answers(path)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("is_there", [False, True])
def test_no_socket_folder_is_created_or_used_behind_another_users_link(tmp_path: Path, is_there: bool) -> None:
    home, victim = tmp_path / "home", tmp_path / "victim"
    path = home / "a" / "b" / "socket"
    path.parent.mkdir(parents=True)
    victim.mkdir()
    job = start_echo(path, tmp_path)
    try:
        wait_until(lambda: answers(path), "the job to answer")
        gpucr.dump(job.pid, tmp_path / "s")
        job.wait()
        shutil.rmtree(home / "a")
        (home / "a").symlink_to(victim)
        os.chown(home, 65534, 65534)
        if is_there:
            (victim / "b").mkdir()
        found = list(victim.rglob("*"))
        refused = command.run("restore", tmp_path / "s")
        assert refused.returncode == 3
        assert "'a', a link that another user can change" in refused.stderr
        assert "GPUCR-UNTRUSTED-PATH" in refused.stderr
        assert list(victim.rglob("*")) == found
        (home / "a").unlink()
        assert gpucr.restore(tmp_path / "s").pid == job.pid
        assert answers(path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.pid, signal.SIGKILL)


OPENS = """
import os, sys, time
os.chdir(sys.argv[2])
with open(sys.argv[1], "a") as log, open(sys.argv[1] + ".ready", "w"):
    while True:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("what", ["file", "folder", "working folder"])
def test_no_file_is_opened_behind_another_users_link(tmp_path: Path, what: str) -> None:
    home, victim = tmp_path / "home", tmp_path / "victim"
    log, cwd = home / "logs" / "log", home / "cwd"
    for folder in (log.parent, cwd, victim):
        folder.mkdir(parents=True)
    for name in ("log", "log.ready"):
        (victim / name).touch()
    job = subprocess.Popen(
        [sys.executable, "-c", OPENS, str(log), str(cwd)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: log.with_name("log.ready").exists(), "the job to open its log")
        gpucr.dump(job.pid, tmp_path / "s")
        job.wait()
        swapped = {"file": log, "folder": log.parent, "working folder": cwd}[what]
        swapped.rename(tmp_path / "aside")
        swapped.symlink_to(victim / "log" if what == "file" else victim)
        for path in (home, log.parent):
            os.chown(path, 65534, 65534, follow_symlinks=False)
        refused = command.run("restore", tmp_path / "s")
        assert refused.returncode == 3, refused.stderr
        assert f"the restored job would have {victim}" in refused.stderr
        assert "GPUCR-UNTRUSTED-PATH" in refused.stderr
        wait_until(lambda: processes.read_stat(job.pid) is None, "what was restored to be gone")
        os.chown(home, 0, 0)
        os.chown(log.parent, 0, 0)
        gpucr.restore(tmp_path / "s")  # what only root can have moved is followed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.pid, signal.SIGKILL)


def start_echo(path: Path, tmp_path: Path) -> subprocess.Popen[bytes]:
    with (tmp_path / "output").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", ECHO, str(path)],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return client.recv(16) == b"here"
