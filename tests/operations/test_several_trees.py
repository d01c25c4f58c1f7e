"""Several trees as one job: dumped into one snapshot of one moment, and restored all or none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr import JobSelector
from gpucr.criu.engine import Criu
from gpucr.driver.cuda import CudaDriver
from gpucr.jobs import sandbox
from gpucr.linux import processes
from gpucr.model import CudaState
from gpucr.operations import restore_steps
from gpucr.snapshot.folder import Snapshot
from gpucr.surroundings.opened_files import require_as_recorded
from tests import command
from tests.counter import Counter, CounterFactory, kill_at_once, wait_until
from tests.stepping import Job, StartJob
from tests.storm import later

pytestmark = pytest.mark.criu

RUNNING = CudaState.RUNNING


@pytest.fixture
def two(counter: CounterFactory) -> tuple[Counter, Counter]:
    return counter("--mib", "4"), counter("--mib", "4", "--fork", "1")


def run(*words: object) -> subprocess.CompletedProcess[str]:
    done = command.run(*words)
    assert done.returncode == 0, done.stderr
    return done


def dump(jobs: tuple[Counter, ...], to: Path | str, *options: str) -> dict[str, Any]:
    """By force: they are on one GPU, and might share memory."""
    done = run("dump", *(job.pid for job in jobs), "--as-one", "--to", to, "--force", "--json", *options)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def assert_go_on(jobs: tuple[Counter, ...], driver: CudaDriver, count: int = 101) -> None:
    for job in jobs:
        assert job.ask() == count
        assert job.send("verify") == "ok"
        assert {driver.state(pid) for pid in job.processes()} == {RUNNING}


def test_two_trees_are_dumped_and_restored(two: tuple[Counter, Counter], driver: CudaDriver, tmp_path: Path) -> None:
    before = [job.processes() for job in two]
    report = dump(two, tmp_path / "s")
    assert (report["pid"], report["process_count"], report["left_running"]) == (two[0].pid, 3, False)
    for job in two:
        job.reap()
        assert not job.processes()
    manifest = Snapshot.open(tmp_path / "s").manifest
    assert manifest.root_pids == (two[0].pid, two[1].pid)
    assert {file.path.partition("/")[0] for file in manifest.files} == {"images", "images-1"}
    run("verify", tmp_path / "s")
    restored = json.loads(run("restore", tmp_path / "s", "--json").stdout)
    assert (restored["pid"], restored["process_count"]) == (two[0].pid, 3)
    assert [job.processes() for job in two] == before
    assert_go_on(two, driver)
    again = gpucr.dump(JobSelector(two[0].pid, two[1].pid), tmp_path / "again", leave_running=True, force=True)
    assert len(again.snapshot.manifest.root_pids) == 2
    assert_go_on(two, driver, 102)


@pytest.mark.parametrize("persist", ["background", later("sync")])
def test_left_running(two: tuple[Counter, Counter], driver: CudaDriver, tmp_path: Path, persist: str) -> None:
    report = dump(two, tmp_path / "s", "--leave-running", "--persist", persist)
    steps = [phase["name"] for phase in report["phases"]]
    assert steps[:7] == ["prepare", "allocate", "quiet", "lock", "checkpoint", "detach", "stop"]
    assert steps[7:10] == ["halt", "block", "dump"]
    assert ("save" in steps[8:9]) is (persist == "sync")
    assert_go_on(two, driver)
    for job in two:
        job.kill()
    gpucr.restore(tmp_path / "s")
    assert_go_on(two, driver)


def test_a_store_holds_several_trees(two: tuple[Counter, Counter], driver: CudaDriver, tmp_path: Path) -> None:
    gpucr.init_store(tmp_path / "store")
    dump(two, f"{tmp_path}/store#a")
    for job in two:
        job.reap()
    run("verify", f"{tmp_path}/store#a", "--deep")
    shown = json.loads(run("inspect", f"{tmp_path}/store#a", "--json").stdout)
    assert [each["pid"] for each in shown["contents"]["processes"]][:2] == [two[0].pid, two[1].pid]
    assert shown["contents"]["problems"] == []
    gpucr.restore(f"{tmp_path}/store#a")
    assert_go_on(two, driver)
    dump(two, f"{tmp_path}/store#b", "--leave-running")
    found = gpucr.diff_snapshots(f"{tmp_path}/store#a", f"{tmp_path}/store#b")
    assert {two[0].pid, two[1].pid} <= {each.pid for each in found if each.kind == "memory"}


# --- without CUDA -------------------------------------------------------------------------------------------------

STEPS = "done()\nwhile True:\n    step()\n    done(turn)\n"
SERVER = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    done(server.getsockname()[1])
    peer = server.accept()[0]
while True:
    step()
    done(peer.recv(100).decode())
"""
CLIENT = """
import socket
peer = socket.create_connection(("127.0.0.1", {port}))
done()
while True:
    step()
    peer.sendall(f"message {{turn}}".encode())
    done()
"""


def status(pid: int) -> str:
    stat = processes.read_stat(pid)
    return stat.status if stat is not None else ""


def come_back(jobs: list[Job], snapshot: Path, **options: Any) -> gpucr.RestoreReport:
    for job in jobs:
        job.reap()
    return gpucr.restore(snapshot, **options)


def test_a_connection_between_two_trees_is_kept(start: StartJob, tmp_path: Path) -> None:
    """Including data in transit: the message was sent, and not yet read."""
    server = start(SERVER)
    client = start(CLIENT.format(port=(server.folder / "done-0").read_text()))
    client.go_on()
    gpucr.dump(JobSelector(client.pid, server.pid), tmp_path / "s")
    come_back([client, server], tmp_path / "s")
    assert server.go_on() == "message 1"
    client.go_on()
    assert server.go_on() == "message 2"


def test_a_stopped_tree_stays_stopped(start: StartJob, tmp_path: Path) -> None:
    runs, stopped = start(STEPS), start(STEPS)
    os.kill(stopped.pid, signal.SIGSTOP)
    wait_until(lambda: status(stopped.pid) == "T", "the stop")
    trees = JobSelector(runs.pid, stopped.pid)
    gpucr.dump(trees, tmp_path / "a", leave_running=True)
    assert runs.go_on() == "1"
    gpucr.dump(trees, tmp_path / "b")
    come_back([runs, stopped], tmp_path / "b")
    assert runs.go_on() == "2"
    assert status(stopped.pid) == "T"
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.go_on() == "1"


def test_a_sandbox_lasts_as_long_as_one_of_its_trees(start: StartJob, tmp_path: Path) -> None:
    first, second, outside = start(STEPS), start(STEPS), start(STEPS)
    gpucr.dump(JobSelector(first.pid, second.pid), tmp_path / "s")
    report = come_back([first, second], tmp_path / "s", isolate=True)
    inside = sandbox.of(report.pid)
    assert inside is not None
    assert (first.go_on(), second.go_on()) == ("1", "1")
    with pytest.raises(gpucr.InvalidRequest, match="in several pid namespaces") as caught:
        gpucr.plan_dump(JobSelector(report.pid, outside.pid), tmp_path / "t", force=True)
    assert caught.value.code == "GPUCR-SEVERAL-TREES"
    gpucr.dump(JobSelector(*report.root_pids), tmp_path / "t")
    assert inside.wait_ended(60)
    report = gpucr.restore(tmp_path / "t")
    inside = sandbox.of(report.pid)
    assert inside is not None
    kill_at_once(first.pids())
    assert second.go_on() == "2"
    kill_at_once(second.pids())
    assert inside.wait_ended(60)


def test_the_registry_knows_each_tree(tmp_path: Path, state_home: Path) -> None:
    for name in ("first", "second"):
        gpucr.run_job(["sleep", "1000"], name=name, isolate=False)
    gpucr.dump(JobSelector("first", "second"), tmp_path / "s")
    assert {job.name: job.state.word for job in gpucr.list_jobs()} == {"first": "dumped", "second": "dumped"}
    report = gpucr.restore(tmp_path / "s")
    assert report.name == "first"
    assert {job.name: job.state.word for job in gpucr.list_jobs()} == {"first": "running", "second": "dumped"}
    kill_at_once(report.root_pids)


def test_trees_that_share_something_are_refused(start: StartJob, tmp_path: Path) -> None:
    """Their common parent can be dumped as one tree, in which they share it."""
    job = start("""
import subprocess
writer = subprocess.Popen(["sleep", "1000"], stdout=subprocess.PIPE)
reader = subprocess.Popen(["sleep", "1001"], stdin=writer.stdout)
done(f"{writer.pid} {reader.pid}")
step()
""")
    writer, reader = map(int, (job.folder / "done-0").read_text().split())
    done = command.run("dump", writer, reader, "--as-one", "--to", tmp_path / "s")
    assert done.returncode == 3
    assert (
        f"process {writer} (sleep) and process {reader} (sleep), of different trees, share something (fd 1 is pipe:["
        in done.stderr
    )
    assert f"dump the process that started them, with all that it started: {job.pid}" in done.stderr
    assert done.stderr.endswith("code:  GPUCR-SEVERAL-TREES\n")
    assert not (tmp_path / "s").exists()
    assert {status(pid) for pid in (writer, reader)} == {"S"}


def test_unnamed_memory_is_no_longer_shared(start: StartJob, tmp_path: Path) -> None:
    job = start("""
import mmap, os, signal
shared = mmap.mmap(-1, 4096)
pids = []
for number in range(2):
    if not (pid := os.fork()):
        signal.pause()
    pids.append(pid)
done(" ".join(map(str, pids)))
step()
""")
    trees = JobSelector(*map(int, (job.folder / "done-0").read_text().split()))
    with pytest.raises(gpucr.Unsupported, match=r"of different trees, share something \(/dev/zero with") as caught:
        gpucr.dump(trees, tmp_path / "s")
    assert caught.value.code == "GPUCR-SEVERAL-TREES"


def test_memory_with_a_name_is_shared_again(start: StartJob, tmp_path: Path) -> None:
    shared = f"/dev/shm/gpucr-test-{os.getpid()}"
    code = f"""
import mmap
with open({shared!r}, "ab+") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
done()
while True:
    step()
    memory[0] += 1
    done(memory[0])
"""
    jobs = [start(code), start(code)]
    try:
        assert [job.go_on() for job in jobs] == ["1", "2"]
        gpucr.dump(JobSelector(*(job.pid for job in jobs)), tmp_path / "s")
        os.unlink(shared)
        come_back(jobs, tmp_path / "s")
        assert [job.go_on() for job in jobs] == ["3", "4"]
    finally:
        os.unlink(shared)


# --- all or none --------------------------------------------------------------------------------------------------


@pytest.fixture
def second_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[int]]:
    """The CRIU of the second tree cannot do this. Returns the calls."""

    def arrange(what: str) -> list[int]:
        calls, real = list[int](), getattr(Criu, what)

        def fail(self: Criu, *arguments: object, **options: object) -> object:
            calls.append(len(calls))
            if len(calls) == 2:
                raise gpucr.CriuError("it cannot", phase=what)
            return real(self, *arguments, **options)

        monkeypatch.setattr(Criu, what, fail)
        return calls

    return arrange


def test_a_tree_that_cannot_be_dumped_leaves_all_running(
    two: tuple[Counter, Counter], driver: CudaDriver, tmp_path: Path, second_fails: Callable[[str], list[int]]
) -> None:
    calls = second_fails("dump")
    with pytest.raises(gpucr.CriuError, match="it cannot"):
        gpucr.dump(JobSelector(*(job.pid for job in two)), tmp_path / "s", force=True)
    assert len(calls) == 2
    assert not (tmp_path / "s").exists()
    assert_go_on(two, driver)


def test_a_tree_that_cannot_be_restored_ends_the_others(
    two: tuple[Counter, Counter],
    driver: CudaDriver,
    tmp_path: Path,
    second_fails: Callable[[str], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dump(two, tmp_path / "s")
    for job in two:
        job.reap()
    calls = second_fails("restore")
    with pytest.raises(gpucr.CriuError, match="it cannot"):
        gpucr.restore(tmp_path / "s")
    assert len(calls) == 2
    assert not any(job.processes() for job in two)
    monkeypatch.undo()
    gpucr.restore(tmp_path / "s")
    assert_go_on(two, driver)


def test_a_tree_refused_at_the_end_ends_the_ready_ones(
    two: tuple[Counter, Counter], driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second tree is complete, and stopped, when the first one's CRIU is told to end."""
    dump(two, tmp_path / "s")
    for job in two:
        job.reap()
    looked = list[int]()

    def refuse(pids: list[int], names: set[str]) -> None:
        looked.append(len(pids))
        if len(looked) == 2:
            raise gpucr.Unsupported("it is not what it was")
        require_as_recorded(pids, names)

    monkeypatch.setattr(restore_steps, "require_as_recorded", refuse)
    with pytest.raises(gpucr.Unsupported, match="it is not what it was"):
        gpucr.restore(tmp_path / "s")
    assert looked == [2, 1]
    assert not any(job.processes() for job in two)
    monkeypatch.undo()
    gpucr.restore(tmp_path / "s")
    assert_go_on(two, driver)


@pytest.mark.parametrize(
    ("event", "phase"), [later("begin", "halt"), ("end", "halt"), ("begin", "dump"), later("end", "dump")]
)
def test_a_cancelled_dump_is_undone_in_all(
    two: tuple[Counter, Counter], driver: CudaDriver, tmp_path: Path, event: str, phase: str
) -> None:
    cancel = gpucr.Cancellation()

    def listen(progress: gpucr.Progress) -> None:
        if (progress.event, progress.phase) == (event, phase):
            cancel.cancel()

    with pytest.raises(gpucr.Interrupted, match="the job is as it was found"):
        gpucr.dump(
            JobSelector(*(job.pid for job in two)), tmp_path / "s", force=True, cancel=cancel, on_progress=listen
        )
    assert not (tmp_path / "s").exists()
    assert_go_on(two, driver)


KILLED = """
import os, signal, sys, gpucr
what, event, phase, place, *pids = sys.argv[1:]
def die(progress):
    if (progress.event, progress.phase) == (event, phase):
        os.kill(os.getpid(), signal.SIGKILL)
if what == "dump":
    gpucr.dump(gpucr.JobSelector(*map(int, pids)), place, force=True, on_progress=die)
else:
    gpucr.restore(place, on_progress=die)
"""


def die_in(what: str, event: str, phase: str, place: Path, *pids: int) -> None:
    done = command.python(KILLED, what, event, phase, place, *pids)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("event", "phase"),
    [later("end", "halt"), later("begin", "dump"), ("end", "dump"), later("end", "save"), later("begin", "end")],
)
def test_gpucr_dies_in_a_dump(
    two: tuple[Counter, Counter], driver: CudaDriver, tmp_path: Path, event: str, phase: str
) -> None:
    """All trees run, and there is no snapshot, or a whole one."""
    die_in("dump", event, phase, tmp_path / "s", *(job.pid for job in two))
    assert_go_on(two, driver)
    is_committed = phase in ("save", "end")
    wait_until(lambda: (tmp_path / "s").exists() is is_committed, "the guard to remove what is no snapshot")
    if is_committed:
        Snapshot.open(tmp_path / "s").verify()


def test_gpucr_dies_while_ending_the_job(two: tuple[Counter, Counter], driver: CudaDriver, tmp_path: Path) -> None:
    """Half of the job must not continue."""
    code = f"""
from gpucr.linux import processes
import os, signal
def half(ids, *rest):
    os.kill([*ids][0].pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
processes.kill_and_wait = half
{KILLED}"""
    command.python(code, "dump", "", "", tmp_path / "s", *(job.pid for job in two))
    wait_until(lambda: not any(job.processes() for job in two), "the guard to end the rest")
    for job in two:
        job.reap()
    gpucr.restore(tmp_path / "s")
    assert_go_on(two, driver)


@pytest.mark.parametrize(
    ("event", "phase"), [later("begin", "criu"), later("end", "criu"), later("end", "unlock"), ("begin", "keep")]
)
def test_gpucr_dies_in_a_restore(
    two: tuple[Counter, Counter], driver: CudaDriver, tmp_path: Path, event: str, phase: str
) -> None:
    dump(two, tmp_path / "s")
    for job in two:
        job.reap()
    die_in("restore", event, phase, tmp_path / "s")
    wait_until(lambda: not any(job.processes() for job in two), "the guard to end what was restored")
    gpucr.restore(tmp_path / "s")
    assert_go_on(two, driver)


# --- frozen -------------------------------------------------------------------------------------------------------


def test_several_trees_are_frozen_saved_and_thawed(
    two: tuple[Counter, Counter], driver: CudaDriver, tmp_path: Path
) -> None:
    pids = [pid for job in two for pid in job.processes()]
    with gpucr.freeze(JobSelector(two[0].pid, two[1].pid), force=True) as frozen:
        assert {status(pid) for pid in pids} == {"T"}
        frozen.save(tmp_path / "s", force=True)
        assert {status(pid) for pid in pids} == {"T"}
    assert_go_on(two, driver)
    with gpucr.freeze(JobSelector(two[0].pid, two[1].pid), force=True) as frozen:
        frozen.end()
    for job in two:
        assert not job.processes()
        job.reap()
    gpucr.restore(tmp_path / "s")
    assert_go_on(two, driver)


def test_a_job_without_cuda_is_frozen(start: StartJob, tmp_path: Path) -> None:
    job = start(STEPS)
    assert job.go_on() == "1"
    with gpucr.freeze(job.pid) as frozen:
        assert (frozen.size_bytes, frozen.lock) == (0, None)
        assert [phase.name for phase in frozen.phases] == ["quiet", "halt"]
        assert status(job.pid) == "T"
        frozen.save(tmp_path / "s")
        assert status(job.pid) == "T"
    assert job.go_on() == "2"
    with gpucr.freeze(job.pid) as frozen:
        frozen.end()
    job.forget(1)
    come_back([job], tmp_path / "s")
    assert job.go_on() == "2"


@pytest.mark.parametrize(
    ("how", "code_of_it"),
    [("os.kill(os.getpid(), signal.SIGKILL)", -9), later("sys.exit(4)", 4), later("if os.fork(): os._exit(5)", 5)],
)
def test_a_job_is_thawed_when_the_program_that_froze_it_ends(start: StartJob, how: str, code_of_it: int) -> None:
    """Even if it has forgotten the job. A fork of the program does not thaw it."""
    jobs = [start(STEPS), start(STEPS)]
    code = f"""
import os, signal, sys, gpucr
gpucr.freeze(gpucr.JobSelector(*map(int, sys.argv[1:])))
assert all(open(f"/proc/{{pid}}/stat").read().rpartition(") ")[2][0] == "T" for pid in sys.argv[1:])
{how}
"""
    done = subprocess.run([sys.executable, "-c", code, *(str(job.pid) for job in jobs)], timeout=60, check=False)
    assert done.returncode == code_of_it
    assert [job.go_on() for job in jobs] == ["1", "1"]
