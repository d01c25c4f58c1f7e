"""Jobs in sandboxes: dumped from outside, restored into new ones, several at once; failures leave nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import CriuError, InvalidRequest, Unsupported
from gpucr.jobs import sandbox
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registered import registry
from gpucr.jobs.sandbox import lookup
from gpucr.linux import process_records, processes
from gpucr.linux.namespaces import namespace_id
from gpucr.model import CudaState
from gpucr.operations import sandbox_steps
from gpucr.operations.sandbox_steps import plan_sandbox
from tests.command import run, run_json
from tests.conftest import require_devices
from tests.counter import CounterFactory, processes_in, state_in, wait_until
from tests.memory_cgroup import limited
from tests.ports import lasting_port
from tests.sandboxed import SandboxedCounter, start_counter
from tests.scenarios.test_killed import is_claimed, killed
from tests.snapshot import samples
from tests.storm import later

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("state_home")]

PROGRAM = """
import json, os, signal, socket, subprocess, sys, threading, time
from multiprocessing import shared_memory

port = int(sys.argv[1])
memory = shared_memory.SharedMemory(name=f"gpucr-sandbox-test-{port}", create=True, size=4096)
server = socket.socket()
server.bind(("127.0.0.1", port))
server.listen()
ours = socket.create_connection(("127.0.0.1", port))
theirs, _ = server.accept()
closed = socket.create_connection(("127.0.0.1", port))
server.accept()[0].close()
closed.close()
child = subprocess.Popen(["sleep", "1000"])
ticks = [0]

def tick():
    while True:
        ticks[0] += 1
        time.sleep(0.001)

threading.Thread(target=tick, daemon=True).start()
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
lines = open("lines", "a", buffering=1)
state_fd = os.open("state", os.O_WRONLY | os.O_CREAT, 0o600)
rounds = 0
while True:
    rounds += 1
    ours.sendall(b"%08d" % rounds)
    memory.buf[:8] = theirs.recv(8)
    lines.write(f"{rounds}\\n")
    state = {"rounds": rounds, "ticks": ticks[0], "memory": int(bytes(memory.buf[:8])), "pid": os.getpid(),
             "child": child.pid, "child lives": child.poll() is None}
    os.pwrite(state_fd, json.dumps(state).encode().ljust(512), 0)
    print("round", rounds, flush=True)
    time.sleep(0.005)
"""


@pytest.fixture
def folder(folder: Path) -> Iterator[Path]:
    yield folder
    for port in folder.glob("port-*"):
        Path("/dev/shm", f"gpucr-sandbox-test-{port.name[5:]}").unlink(missing_ok=True)


class Program:
    """The program above, as a job: what it says about itself."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.port = lasting_port()
        (folder / f"port-{self.port}").touch()
        self.memory = Path("/dev/shm", f"gpucr-sandbox-test-{self.port}")
        command = [sys.executable, "-c", PROGRAM, str(self.port)]
        started = gpucr.run_job(command, cwd=folder, name="job", **options)
        self.record: JobRecord = started.record
        wait_until(self.is_ready, "the job to start")

    def is_ready(self) -> bool:
        if not processes.is_alive(self.record.root):
            pytest.fail(f"the job has ended: {self.record.log.read_text()}")
        return (self.folder / "state").exists() and bool((self.folder / "state").read_bytes())

    def state(self) -> dict[str, int]:
        return state_in(self.folder / "state")

    def assert_goes_on(self) -> dict[str, int]:
        before = self.state()
        wait_until(lambda: self.state()["rounds"] > before["rounds"] + 3, "the job to continue")
        wait_until(lambda: self.state()["ticks"] > before["ticks"] + 3, "its second thread to continue")
        state = self.state()
        assert state["memory"] == state["rounds"]
        assert state["child lives"]
        return state


def status_of(name: str) -> tuple[str, int | None, int | None]:
    found = registry().find(name).state
    return found.word, found.exit_code, found.signal


def lineage_of(pid: int) -> str:
    found = sandbox.of(pid)
    assert found is not None
    return found.lineage


# --- dump and restore --------------------------------------------------------------------------------------------


def test_a_whole_job_is_restored(folder: Path, tmp_path: Path) -> None:
    job = Program(folder)
    before = job.assert_goes_on()
    keeper = job.record.keeper
    assert keeper is not None
    gpucr.dump("job", tmp_path / "s")
    assert not processes_in(folder)
    assert not processes.is_alive(keeper)
    at_dump = job.state()
    report = gpucr.restore(tmp_path / "s")
    assert report.name == "job"
    after = job.assert_goes_on()
    assert (after["pid"], after["child"]) == (before["pid"], before["child"]) == (at_dump["pid"], at_dump["child"])
    lines = [int(line) for line in (folder / "lines").read_text().split()]
    assert lines == list(range(1, len(lines) + 1))
    os.kill(report.pid, signal.SIGTERM)
    wait_until(lambda: status_of("job") == ("ended", 7, None), "the exit code to be known")


def test_a_job_left_running_keeps_its_keeper(folder: Path, tmp_path: Path) -> None:
    job = Program(folder)
    gpucr.dump("job", tmp_path / "s", leave_running=True)
    job.assert_goes_on()
    os.kill(job.record.pid, signal.SIGTERM)
    wait_until(lambda: status_of("job") == ("ended", 7, None), "the exit code to be known")


def test_the_keepers_pid_stands_for_the_job(folder: Path, tmp_path: Path) -> None:
    job = Program(folder)
    assert job.record.keeper is not None
    report = gpucr.dump(job.record.keeper.pid, tmp_path / "s", leave_running=True)
    assert report.pid == job.record.pid


def test_a_keeper_unknown_here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gpucr with another /run: it cannot distinguish the job from a container's, and says what it takes."""
    job = Program(folder)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(process_records, "runtime_folder", lambda: tmp_path / "run" / "gpucr")
        with pytest.raises(Unsupported, match=r"no keeper of it is noted in /run/gpucr/keepers") as refused:
            gpucr.dump("job", tmp_path / "s")
    assert refused.value.code == "GPUCR-NO-KEEPER"
    assert not (tmp_path / "s").exists()
    job.assert_goes_on()
    gpucr.dump("job", tmp_path / "s", leave_running=True)


@pytest.mark.parametrize("isolate", [True, later(False)])
def test_a_job_in_other_cgroups_than_gpucr(folder: Path, tmp_path: Path, isolate: bool) -> None:
    """As a job of one login has for a gpucr of another one, or that of a batch system's next start: it goes there."""
    with limited(1 << 34) as (cgroup, _):
        job = Program(folder, isolate=isolate)
        for pid in processes_in(folder):
            (cgroup / "cgroup.procs").write_text(str(pid))
        gpucr.dump("job", tmp_path / "s")
        gpucr.restore(tmp_path / "s")
        job.assert_goes_on()
        for pid in processes_in(folder):
            assert Path(f"/proc/{pid}/cgroup").read_text() == Path("/proc/self/cgroup").read_text()


def test_pids_ports_and_names_taken_outside(folder: Path, tmp_path: Path) -> None:
    job = Program(folder)
    gpucr.dump("job", tmp_path / "s")
    with socket.create_server(("127.0.0.1", job.port)):
        job.memory.write_bytes(b"other")
        gpucr.restore(tmp_path / "s")
        job.assert_goes_on()
        assert job.memory.read_bytes() == b"other"


def test_dumped_again_after_a_restore(folder: Path, tmp_path: Path) -> None:
    job = Program(folder)
    for number in range(2):
        gpucr.dump("job", tmp_path / str(number))
        gpucr.restore(tmp_path / str(number))
        job.assert_goes_on()


def test_a_sandbox_with_the_machines_network(folder: Path, tmp_path: Path) -> None:
    job = Program(folder, network="host")
    gpucr.dump("job", tmp_path / "s")
    report = gpucr.restore(tmp_path / "s")
    job.assert_goes_on()
    found = sandbox.of(report.pid)
    assert found is not None
    assert found.network == "host"
    assert namespace_id(report.pid, "net") == namespace_id("self", "net")
    assert namespace_id(report.pid, "pid") != namespace_id("self", "pid")


def test_no_mounts_and_no_processes_are_left(folder: Path, tmp_path: Path) -> None:
    def mounts() -> list[str]:
        """Without those of tests that run beside it."""
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return [line for line in lines if str(tmp_path) in line or "/pytest-of-" not in line]

    before = mounts()
    job = Program(folder)
    lineage = lineage_of(job.record.pid)
    gpucr.dump("job", tmp_path / "s")
    report = gpucr.restore(tmp_path / "s")
    os.kill(report.pid, signal.SIGKILL)
    wait_until(lambda: status_of("job") == ("ended", None, signal.SIGKILL), "the end to be known")
    wait_until(lambda: not processes_in(folder), "the child to be ended with the sandbox")
    assert sandbox.copies(lineage) == ()
    assert mounts() == before


# --- clones ------------------------------------------------------------------------------------------------------


def test_clones_run_beside_the_original(folder: Path, tmp_path: Path, driver: CudaDriver) -> None:
    with start_counter(folder, "--mib", "16") as original:
        assert original.ask() == 101
        gpucr.dump("counter", tmp_path / "s", leave_running=True)
        assert original.ask() == 102
        reports = [gpucr.restore(tmp_path / "s", clone=True), gpucr.restore(tmp_path / "s", clone=True, name="third")]
        assert [report.name for report in reports] == ["counter-2", "third"]
        with contextlib.ExitStack() as opened:
            clones = [opened.enter_context(SandboxedCounter(report.pid, original.port)) for report in reports]
            assert [clone.ask() for clone in clones] == [102, 102]
            assert clones[0].ask() == 103
            assert original.ask() == 103
            for each in (original, *clones):
                assert each.send("verify") == "ok"
                assert driver.state(each.pid) is CudaState.RUNNING
            assert {each.sandbox.lineage for each in (original, *clones)} == {original.sandbox.lineage}
            inner = {processes.describe(each.pid).ns_pids[-1] for each in (original, *clones)}
            assert len(inner) == 1


def test_a_clone_has_its_own_log(folder: Path, tmp_path: Path) -> None:
    job = Program(folder)
    gpucr.dump("job", tmp_path / "s")
    at_dump = job.record.log.read_bytes()
    report = gpucr.restore(tmp_path / "s", clone=True)
    job.assert_goes_on()
    record = registry().find("job-2").record
    assert record is not None
    assert record.log != job.record.log
    wait_until(lambda: record.log.read_text().count("round") > 3, "the clone's own log")
    assert job.record.log.read_bytes() == at_dump
    assert record.log.stat().st_mode & 0o777 == 0o600
    gpucr.dump("job-2", tmp_path / "t")
    written = record.log.read_bytes()
    gpucr.restore(tmp_path / "t")
    wait_until(lambda: len(record.log.read_bytes()) > len(written), "the restored clone to write on")
    assert record.log.read_bytes().startswith(written)
    assert report.name == "job-2"


def test_a_clone_after_the_original_and_its_log_are_gone(folder: Path, tmp_path: Path) -> None:
    job = Program(folder)
    gpucr.dump("job", tmp_path / "s")
    gpucr.forget_job("job", force=True)
    assert not job.record.log.exists()
    gpucr.restore(tmp_path / "s", clone=True)
    job.assert_goes_on()
    assert not job.record.log.exists()


def test_a_second_restore_is_refused_while_the_job_runs(folder: Path, tmp_path: Path) -> None:
    job = Program(folder)
    gpucr.dump("job", tmp_path / "s", leave_running=True)
    with pytest.raises(InvalidRequest, match=f"runs: process {job.record.pid}") as caught:
        gpucr.restore(tmp_path / "s")
    assert "--clone" in str(caught.value.hint)
    os.kill(job.record.pid, signal.SIGKILL)
    wait_until(lambda: not processes_in(folder), "the job to end")
    gpucr.restore(tmp_path / "s")
    job.assert_goes_on()


def test_a_second_restore_is_refused_during_the_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Program(folder)
    lineage = lineage_of(job.record.pid)
    gpucr.dump("job", tmp_path / "s")
    monkeypatch.setattr(sandbox_steps, "LEFTOVER_LIMIT_S", 0.1)
    first = sandbox.empty(log_path=None, status_path=None, lineage=lineage, last_pid=0)
    try:
        with pytest.raises(Unsupported, match="another gpucr restores") as caught:
            gpucr.restore(tmp_path / "s", name="other")
        assert caught.value.code == "GPUCR-BUSY"
        assert keepers_of(lineage) == [first.sandbox.keeper.pid]
        assert not processes_in(folder)
    finally:
        assert first.end()
    gpucr.restore(tmp_path / "s")
    job.assert_goes_on()


SERVES = """
import os, time
between = os.fork()
if between == 0:
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.01)
    served = os.open("/dev/fuse", os.O_RDWR)  # as the server of an AppImage, which has left its parent
    open("serves", "w").close()
else:
    os.waitpid(between, 0)
while True:
    time.sleep(1)
"""


def test_a_dump_is_refused_that_would_lose_a_fuse_file_system(folder: Path, tmp_path: Path) -> None:
    """The server ends with the sandbox, and is in no snapshot."""
    require_devices(SERVES)
    job = gpucr.run_job([sys.executable, "-c", SERVES], cwd=folder, name="job").record
    wait_until((folder / "serves").exists, "the server")
    with pytest.raises(Unsupported, match="serves a FUSE file system in the job's pid namespace") as caught:
        gpucr.dump("job", tmp_path / "s")
    assert caught.value.code == "GPUCR-FUSE"
    assert processes.is_alive(job.root)


def test_a_clone_of_a_job_without_a_sandbox_is_refused(folder: Path, tmp_path: Path) -> None:
    Program(folder, isolate=False)
    gpucr.dump("job", tmp_path / "s", leave_running=True)
    with pytest.raises(InvalidRequest, match="in no sandbox") as caught:
        gpucr.restore(tmp_path / "s", clone=True)
    assert "--isolate" in str(caught.value.hint)


def test_a_clone_takes_over_socket_names_and_reports_it(folder: Path, tmp_path: Path) -> None:
    code = (
        "import socket, time\n"
        "s = socket.socket(socket.AF_UNIX); s.bind('talk'); s.listen(); print('ready', flush=True); time.sleep(1000)"
    )
    started = gpucr.run_job([sys.executable, "-c", code], cwd=folder, name="talker")
    wait_until(lambda: "ready" in started.record.log.read_text(), "the job to listen")
    gpucr.dump("talker", tmp_path / "s", leave_running=True)
    assert gpucr.Snapshot.open(tmp_path / "s").manifest.folders == ()  # the socket has a relative name
    absolute = code.replace("'talk'", repr(str(folder / "call")))
    started = gpucr.run_job([sys.executable, "-c", absolute], cwd=folder, name="caller")
    wait_until(lambda: "ready" in started.record.log.read_text(), "the job to listen")
    gpucr.dump("caller", tmp_path / "t", leave_running=True)
    report = gpucr.restore(tmp_path / "t", clone=True)
    assert "takes over the names" in " ".join(report.warnings)


# --- a job that was in no sandbox, restored into one --------------------------------------------------------------


def test_a_keeper_ends_while_copies_are_searched(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lineage = lineage_of(Program(folder).record.pid)
    assert len(sandbox.copies(lineage)) == 1
    monkeypatch.setattr(lookup, "pids_of", lambda _pid: ())  # as of a process that has ended
    assert sandbox.copies(lineage) == ()


def test_a_job_isolated_only_by_the_restore(folder: Path, tmp_path: Path) -> None:
    job = Program(folder, isolate=False)
    before = job.assert_goes_on()
    assert sandbox.of(job.record.pid) is None
    gpucr.dump("job", tmp_path / "s", leave_running=True)
    with pytest.raises(InvalidRequest, match="runs"):
        gpucr.restore(tmp_path / "s", isolate=True)
    report = gpucr.restore(tmp_path / "s", isolate=True, clone=True)  # its pid, port and name are all in use
    assert report.name == "job-2"
    found = sandbox.of(report.pid)
    assert found is not None
    assert found.root is not None
    assert processes.describe(report.pid).ns_pids[-1] == before["pid"]
    os.kill(job.record.pid, signal.SIGKILL)
    job.assert_goes_on()
    gpucr.dump("job-2", tmp_path / "t")
    gpucr.restore(tmp_path / "t")
    job.assert_goes_on()


def test_a_job_gpucr_did_not_start(folder: Path, tmp_path: Path, counter: CounterFactory) -> None:
    job = counter("--mib", "4")
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    with pytest.raises(InvalidRequest, match="was not started with"):
        gpucr.restore(tmp_path / "s", isolate=True, clone=True)
    report = gpucr.restore(tmp_path / "s", isolate=True)
    assert report.name is None
    with pytest.raises(InvalidRequest, match="runs: process"):
        gpucr.restore(tmp_path / "s", isolate=True)
    gpucr.dump(report.pid, tmp_path / "t")
    report = gpucr.restore(tmp_path / "t")
    with SandboxedCounter(report.pid, job.port) as restored:
        assert restored.ask() == 101


# --- failures ----------------------------------------------------------------------------------------------------


def test_a_failed_restore_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    job = Program(folder)
    lineage = lineage_of(job.record.pid)
    gpucr.dump("job", tmp_path / "s")
    (folder / "lines").rename(folder / "away")
    with pytest.raises((CriuError, Unsupported)):
        gpucr.restore(tmp_path / "s", force=True)
    assert not processes_in(folder)
    assert sandbox.copies(lineage) == ()
    assert status_of("job")[0] == "dumped"
    (folder / "away").rename(folder / "lines")
    gpucr.restore(tmp_path / "s")
    job.assert_goes_on()


RESTORE_PHASES = ["verify", "sandbox", "criu", "hold", "restore", "release", "keep"]


@pytest.mark.parametrize("phase", [*map(later, RESTORE_PHASES[:-1]), RESTORE_PHASES[-1]])
def test_gpucr_is_killed_in_a_restore(folder: Path, tmp_path: Path, phase: str) -> None:
    with start_counter(folder, "--mib", "16", "--fork", "1") as job:
        lineage, port = job.sandbox.lineage, job.port
        gpucr.dump("counter", tmp_path / "s")
    killed("begin", phase, "restore", tmp_path / "s")
    wait_until(lambda: not processes_in(folder), "the half-restored processes to be ended")
    wait_until(lambda: not keepers_of(lineage), "the sandbox to end")
    report = gpucr.restore(tmp_path / "s")
    with SandboxedCounter(report.pid, port) as job:
        assert job.ask() == 101
        assert job.send("verify") == "ok"


def keepers_of(lineage: str) -> list[int]:
    """Also of sandboxes in which no job runs yet."""
    found = []
    for pid in processes.all_pids():
        its = sandbox.of(pid) if (stat := processes.read_stat(pid)) and stat.name == "gpucr-keeper" else None
        if its is not None and its.lineage == lineage:
            found.append(pid)
    return found


@pytest.mark.parametrize("phase", [*map(later, ["prepare", "lock", "checkpoint", "detach"]), "dump"])
def test_gpucr_is_killed_in_a_dump(folder: Path, tmp_path: Path, driver: CudaDriver, phase: str) -> None:
    with start_counter(folder, "--mib", "16", "--fork", "1") as job:
        pids = processes_in(folder)
        killed("begin", phase, "dump", job.pid, tmp_path / "s")
        assert job.ask() == 101
        wait_until(lambda: not (tmp_path / "s").exists(), "the unfinished snapshot to be removed")
        wait_until(lambda: not is_claimed(pids), "the guard to be done")
        assert processes_in(folder) == pids
        gpucr.dump("counter", tmp_path / "s")
        gpucr.restore(tmp_path / "s")


def test_a_job_without_cuda_whose_restore_is_killed(folder: Path, tmp_path: Path) -> None:
    """There is no guard for it: the keeper ends by itself."""
    job = Program(folder)
    lineage = lineage_of(job.record.pid)
    gpucr.dump("job", tmp_path / "s")
    killed("end", "criu", "restore", tmp_path / "s")
    wait_until(lambda: not processes_in(folder) and not keepers_of(lineage), "everything to end")
    gpucr.restore(tmp_path / "s")
    job.assert_goes_on()


# --- what is refused, and the command ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["spawn", later("socket")])
def test_a_signal_while_criu_starts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A process created in the sandbox that nobody reaps would keep the sandbox from ending."""
    job = Program(folder)
    gpucr.dump("job", tmp_path / "s")
    receive, join = socket.recv_fds, threading.Thread.join
    sent: list[str] = []

    def interrupt() -> None:
        if not sent:
            sent.append(where)
            signal.raise_signal(signal.SIGINT)

    def receive_interrupted(*arguments: Any) -> Any:
        interrupt()
        return receive(*arguments)

    def join_interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "gpucr visit":
            interrupt()
        join(thread, timeout)

    if where == "socket":
        monkeypatch.setattr(socket, "recv_fds", receive_interrupted)
    else:
        monkeypatch.setattr(threading.Thread, "join", join_interrupted)
    with pytest.raises(gpucr.Interrupted):
        gpucr.restore(tmp_path / "s")
    assert sent == [where]
    assert processes_in(folder) == []
    gpucr.restore(tmp_path / "s")
    job.assert_goes_on()


def test_a_job_on_a_terminal_is_refused_in_a_sandbox(tmp_path: Path) -> None:
    snapshot = samples.committed(tmp_path / "s")
    with pytest.raises(InvalidRequest, match="terminal") as caught:
        plan_sandbox(snapshot, None, isolate=True, clone=False, shell_job=True)
    assert "gpucr run" in str(caught.value.hint)


def test_a_clone_needs_its_own_log(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no log of its own"):
        plan_sandbox(samples.committed(tmp_path / "s"), None, isolate=False, clone=True, shell_job=False)


ORPHANS = """
import os, time
os.pipe()
if os.fork() == 0:
    parent = os.getpid()
    if os.fork() == 0:
        os.setsid()
        while os.getppid() == parent:
            time.sleep(0.01)
        open("orphan", "w").close()
        time.sleep(1000)
    os._exit(0)
os.wait()
time.sleep(1000)
"""


def test_a_process_that_has_lost_its_parent_shares_a_pipe(folder: Path, tmp_path: Path) -> None:
    """It is below the keeper: the process that started both is the job itself, and does not help."""
    job = gpucr.run_job([sys.executable, "-c", ORPHANS], cwd=folder, name="job", isolate=True).record
    wait_until((folder / "orphan").exists, "the job to start")
    with pytest.raises(Unsupported) as caught:
        gpucr.dump(job.root.pid, tmp_path / "s")
    assert caught.value.code == "GPUCR-SHARED-OUTSIDE"
    assert f"it has lost its parent, so it is not below {job.root.pid} (python" in str(caught.value.hint)


def test_with_the_command(folder: Path, tmp_path: Path, driver: CudaDriver) -> None:
    with start_counter(folder, "--mib", "4") as original:
        run_json("dump", "counter", "--to", tmp_path / "s", "--leave-running")
        refused = run("restore", tmp_path / "s")
        assert refused.returncode == 2
        assert "--clone" in refused.stderr
        said = run_json("restore", tmp_path / "s", "--clone", "--name", "copy")
        assert said["name"] == "copy"
        names = [phase["name"] for phase in said["phases"]]
        assert names[-1] == "keep"
        assert names.index("sandbox") < names.index("criu")
        with SandboxedCounter(said["pid"], original.port) as clone:
            assert clone.ask() == 101
        run_json("suspend", "copy")
        assert driver.state(said["pid"]) is CudaState.CHECKPOINTED
        run_json("resume", "copy")
        run_json("dump", "copy", "--to", tmp_path / "t")
        said = run_json("restore", tmp_path / "t", "--isolate", "--clone")
        assert said["name"] == "copy-2"
