"""Rehearsals: a snapshot is restored beside its job, nothing of it runs, and the world stays as it was."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

import gpucr
from gpucr.errors import InvalidRequest, RehearsalFailed, SnapshotDamaged, Unsupported
from gpucr.linux import processes
from gpucr.linux.private_view import View
from gpucr.operations.rehearse_steps import CheckRestored
from gpucr.undo.events import Progress
from tests.command import run, run_json
from tests.conftest import MakeMachine
from tests.counter import CounterFactory, wait_until
from tests.scenarios.building_blocks import BLOCKS
from tests.scenarios.test_agreement import Composed
from tests.scenarios.test_killed import killed
from tests.snapshot import samples
from tests.stepping import StartJob
from tests.storm import long, sample
from tests.world import settled, world

pytestmark = [pytest.mark.criu, pytest.mark.root, pytest.mark.usefixtures("state_home")]

MAKING = [
    *("fifo", "local server", "connection not accepted", "TCP server", "udp", "deleted", "deleted dir", "deleted lib"),
    *("flock", "POSIX lock", "lock of an open file", "lease", "inotify", "pty", "memfd map", "anonymous memory"),
]
"""Blocks for which a restore makes, removes, locks or binds something."""

ALONE = [name for name in BLOCKS if name in {"deleted cwd", "link", "zombie", "stopped", "self unshare net"}]

REHEARSALS = 500


@contextlib.contextmanager
def composed(folder: Path, names: Sequence[str]) -> Iterator[Composed]:
    job = Composed(folder, list(names))
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.pid, signal.SIGCONT)
        job.close()


def stand_still(pid: int) -> None:
    """Stop a job, so that the world changes by nothing that it does itself."""
    os.kill(pid, signal.SIGSTOP)
    processes.wait_for_stop([pid], 10.0)


# --- the world ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [MAKING, *([name] for name in ALONE)], ids=lambda names: "+".join(names)[:20])
def test_the_world_is_as_before(names: list[str], tmp_path: Path) -> None:
    with composed(tmp_path / "job", names) as job:
        gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
        stand_still(job.pid)
        before = settled(tmp_path / "job", read=[tmp_path / "s"])
        report = gpucr.rehearse(tmp_path / "s")
        assert world(tmp_path / "job", read=[tmp_path / "s"]) == before
        assert report.processes == len(report.snapshot.manifest.processes)
        assert report.left_out == ()
        os.kill(job.pid, signal.SIGCONT)
        job.wait_for_more()


@long
@pytest.mark.timeout(1200)
def test_hundreds_of_rehearsals_leave_no_trace(
    tmp_path: Path, state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    with composed(tmp_path / "job", MAKING) as job:
        gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
        stand_still(job.pid)
        before = settled(tmp_path / "job", read=[tmp_path / "s"])
        for _ in range(REHEARSALS):
            gpucr.rehearse(tmp_path / "s")
            assert world(tmp_path / "job", read=[tmp_path / "s"]) == before
            assert processes_in_views(job.folder) == [job.pid]
            assert not [*(tmp_path / "tmp").iterdir(), *(state_home / "log").rglob("*")]
        os.kill(job.pid, signal.SIGCONT)
        job.wait_for_more()


def test_a_file_that_grows_meanwhile_is_no_difference(tmp_path: Path) -> None:
    """The job runs on, and writes: its sandbox has the file as it was a moment ago."""
    with composed(tmp_path / "job", ["plain"]) as job:
        gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
        for _ in range(3):
            job.wait_for_more()
            gpucr.rehearse(tmp_path / "s")


def test_a_stop_that_is_still_pending_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a busy machine: the restored process was to stop, and in state R when it was compared."""
    waited: list[int] = []
    wait = processes.wait_for_stop

    def wait_for_stop(pids: Iterable[int], timeout_s: float) -> None:
        found = list(pids)
        waited.extend(found)
        wait(found, timeout_s)

    monkeypatch.setattr(processes, "wait_for_stop", wait_for_stop)
    with composed(tmp_path / "job", ["plain"]) as job:
        gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
        waited.clear()
        gpucr.rehearse(tmp_path / "s")
    assert len(waited) == 1


LARGE = """
import mmap
file = open("large", "w+b")
file.truncate(8 << 30)
memory = mmap.mmap(file.fileno(), 1 << 20)
memory[:5] = b"large"
done()
step()
done()
"""


def test_a_large_file_is_not_copied(start: StartJob, tmp_path: Path) -> None:
    job = start(LARGE)
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    used: list[int] = []

    def look(progress: Progress) -> None:
        if (progress.event, progress.phase) == ("begin", "compare"):
            copies = [pid for pid in processes_in_views(job.folder) if pid != job.pid]
            used.extend(os.statvfs(f"/proc/{pid}/root{job.folder}").f_blocks for pid in copies)
            used.extend(os.stat(f"/proc/{pid}/root{job.folder}/large").st_blocks * 512 for pid in copies)

    gpucr.rehearse(tmp_path / "s", on_progress=look)
    assert used
    assert used[-1] <= 2 << 20
    assert job.go_on() == "ok"


def processes_in_views(folder: Path) -> list[int]:
    """Processes whose working folder has this name, in any mounts."""
    found = []
    for pid in processes.all_pids():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/cwd") == str(folder):
                found.append(pid)
    return found


COUNTING = """
import ctypes
number = ctypes.c_uint64(0)
done(ctypes.addressof(number))
while True:
    number.value += 1
"""


def test_no_instruction_of_the_program_runs(start: StartJob, tmp_path: Path) -> None:
    job = start(COUNTING)
    address = int(job.wait_done())

    def count(pid: int) -> int:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return int.from_bytes(memory.read(8), "little")

    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    seen: dict[str, int] = {}

    def look(progress: Progress) -> None:
        if progress.phase in ("compare", "end") and progress.event == "begin":
            (copy,) = [pid for pid in processes_in_views(job.folder) if pid != job.pid]
            now = count(job.pid)
            wait_until(lambda: count(job.pid) > now + 100, "the job to count on")
            seen[progress.phase] = count(copy)

    gpucr.rehearse(tmp_path / "s", on_progress=look)
    assert seen["compare"] == seen["end"] < count(job.pid)
    assert processes_in_views(job.folder) == [job.pid]


def test_ports_of_addresses_that_only_the_machine_has(start: StartJob, tmp_path: Path) -> None:
    job = start(
        "import socket\n"
        "udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "udp.connect(('127.0.0.1', 9))\n"
        "name = udp.getsockname()\n"
        "tcp = socket.create_server(('0.0.0.0', 0))\n"
        "done()\nstep()\ndone()\n"
    )
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    gpucr.rehearse(tmp_path / "s")
    assert job.go_on() == "ok"


def test_a_socket_that_is_connected_to_a_daemon(start: StartJob, tmp_path: Path) -> None:
    """The overlay's inode of its name is none that the daemon has bound: the name itself is shown."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon:
        daemon.bind(str(tmp_path / "log"))
        job = start(
            "import socket\nlog = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
            f"log.connect({str(tmp_path / 'log')!r})\n"
            "done()\nstep()\nlog.send(b'after')\ndone()\n"
        )
        gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
        gpucr.rehearse(tmp_path / "s")
        daemon.setblocking(False)
        with pytest.raises(BlockingIOError):
            daemon.recv(16)
        assert job.go_on() == "ok"
        assert daemon.recv(16) == b"after"


# --- what it must find ----------------------------------------------------------------------------------------------


@pytest.fixture
def with_library(start: StartJob, tmp_path: Path) -> Callable[[], Path]:
    """A job that has mapped a library, and its snapshot."""

    def dumped() -> Path:
        job = start(
            "import ctypes, shutil\n"
            "shutil.copy('/lib/x86_64-linux-gnu/libz.so.1', 'l.so')\n"
            "library = ctypes.CDLL('./l.so')\n"
            "done()\nstep()\ndone()\n"
        )
        gpucr.dump(job.pid, tmp_path / "s")
        job.reap()
        gpucr.rehearse(tmp_path / "s")
        return job.folder / "l.so"

    return dumped


def test_a_library_that_is_gone(with_library: Callable[[], Path], tmp_path: Path) -> None:
    with_library().unlink()
    with pytest.raises(RehearsalFailed, match=r"l\.so") as failed:
        gpucr.rehearse(tmp_path / "s")
    assert failed.value.cause_code == "GPUCR-FILE-MISSING"
    assert failed.value.exit_code == 5


def test_a_mode_that_changed(with_library: Callable[[], Path], tmp_path: Path) -> None:
    with_library().chmod(0o600)
    with pytest.raises(RehearsalFailed, match=r"l\.so") as failed:
        gpucr.rehearse(tmp_path / "s")
    assert failed.value.cause_code == "GPUCR-FILE-CHANGED"


def test_a_mode_that_changed_is_found_by_the_restore_itself(
    with_library: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nothing had looked beforehand."""
    from gpucr.operations import rehearse as module

    with_library().chmod(0o600)
    monkeypatch.setattr(module, "_findings", lambda *_: [])
    with pytest.raises(RehearsalFailed):
        gpucr.rehearse(tmp_path / "s")


FROM_MEMORY = """
import os, shutil, sys
fd = os.memfd_create("program", 0)
with open(shutil.which("sleep"), "rb") as program, open(fd, "wb", closefd=False) as memory:
    memory.write(program.read())
os.execve(fd, ["sleep", "1000"], {})
"""


def test_a_program_run_from_memory(tmp_path: Path) -> None:
    """No check of the dump's was asked (--force): the rehearsal finds out."""
    null = subprocess.DEVNULL
    with subprocess.Popen(
        [sys.executable, "-c", FROM_MEMORY], stdin=null, stdout=null, stderr=null, start_new_session=True
    ) as job:
        try:
            wait_until(lambda: "memfd" in os.readlink(f"/proc/{job.pid}/exe"), "the program to be replaced")
            with pytest.raises(Unsupported):
                gpucr.dump(job.pid, tmp_path / "s")
            with pytest.raises(RehearsalFailed):
                gpucr.dump(job.pid, tmp_path / "s", force=True, rehearse=True)
            assert not (tmp_path / "s").exists()
            stat = processes.read_stat(job.pid)
            assert stat is not None
            assert stat.status == "S"
        finally:
            job.kill()


def test_a_process_that_is_another_one(start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start("done()\nstep()\ndone()\n")
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    monkeypatch.setattr("gpucr.operations.rehearse_steps.processes.threads", lambda pid: (pid, pid + 1))
    with pytest.raises(RehearsalFailed, match="2 threads, and had 1"):
        gpucr.rehearse(tmp_path / "s")
    assert processes_in_views(job.folder) == [job.pid]


# --- device memory ----------------------------------------------------------------------------------------------------


def test_contexts_and_device_memory_come_back(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "8")
    assert job.ask() == 101
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    report = gpucr.rehearse(tmp_path / "s")
    assert [phase.name for phase in report.phases][-4:] == ["hold", "restore", "compare", "end"]
    assert report.left_out == ()
    assert report.device_bytes >= 8 << 20
    assert job.ask() == 102


def test_beside_a_job_that_fills_the_gpu(machine: MakeMachine, counter: CounterFactory, tmp_path: Path) -> None:
    machine("1x256MiB")
    job = counter("--mib", "150")
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    report = gpucr.rehearse(tmp_path / "s")
    assert len(report.left_out) == 1
    assert "free" in report.left_out[0]
    assert "restore" not in [phase.name for phase in report.phases]
    assert job.ask() == 101


@pytest.mark.parametrize("gpus", ["2x16GiB", "1x256MiB"], ids=["restored", "only read"])
def test_device_memory_that_is_damaged(
    gpus: str, machine: MakeMachine, counter: CounterFactory, tmp_path: Path
) -> None:
    machine(gpus)
    job = counter("--mib", "150" if gpus.startswith("1x") else "8")
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    stored = max((tmp_path / "s" / "device").iterdir(), key=lambda path: path.stat().st_blocks)
    with stored.open("r+b") as file:
        start = file.seek(os.lseek(file.fileno(), 0, os.SEEK_DATA))
        first = file.read(1)[0]
        file.seek(start)
        file.write(bytes([first ^ 1]))
    with pytest.raises(SnapshotDamaged):
        gpucr.rehearse(tmp_path / "s")
    assert job.ask() == 101


# --- where, and how it ends -------------------------------------------------------------------------------------------


def test_a_snapshot_in_a_store(start: StartJob, tmp_path: Path) -> None:
    gpucr.init_store(tmp_path / "store")
    job = start("done()\nstep()\ndone()\n")
    gpucr.dump(job.pid, f"{tmp_path}/store#one", leave_running=True)
    stand_still(job.pid)
    before = settled(job.folder, read=[tmp_path / "store"])
    assert gpucr.rehearse(f"{tmp_path}/store#one").processes == 1
    assert world(job.folder, read=[tmp_path / "store"]) == before
    os.kill(job.pid, signal.SIGCONT)
    assert job.go_on() == "ok"


def test_a_job_in_a_sandbox(start_sandboxed: StartJob, tmp_path: Path) -> None:
    job = start_sandboxed(
        "from multiprocessing import shared_memory\n"
        "memory = shared_memory.SharedMemory('gk', True, 64)\n"
        "done()\nstep()\ndone()\n"
    )
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    assert gpucr.rehearse(tmp_path / "s").processes == len(job.pids())
    assert job.go_on() == "ok"


@pytest.mark.parametrize("phase", sample(["sandbox", "criu", "compare", "end"], 2))
def test_gpucr_is_killed(phase: str, start: StartJob, tmp_path: Path) -> None:
    job = start("done()\nstep()\ndone()\n")
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    stand_still(job.pid)
    before = settled(job.folder, read=[tmp_path / "s"])
    killed("begin", phase, "rehearse", tmp_path / "s")
    wait_until(lambda: processes_in_views(job.folder) == [job.pid], "what was restored to end")
    assert world(job.folder, read=[tmp_path / "s"]) == before
    os.kill(job.pid, signal.SIGCONT)
    assert job.go_on() == "ok"


def test_a_terminal_outside_is_refused(tmp_path: Path) -> None:
    null = subprocess.DEVNULL
    with subprocess.Popen(["sleep", "1000"], stdin=null, stdout=null, stderr=null) as job:
        try:
            with pytest.raises(Unsupported, match="terminal outside") as refused:
                gpucr.plan_dump(job.pid, tmp_path / "s", rehearse=True, only=True)
            assert refused.value.code == "GPUCR-NO-REHEARSAL"
        finally:
            job.kill()


def test_the_command(start: StartJob, tmp_path: Path) -> None:
    job = start("done()\nstep()\ndone()\n")
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    said = run("verify", "--rehearse", tmp_path / "s")
    assert said.returncode == 0, said.stderr
    assert "1 process came back" in said.stdout
    printed = run_json("verify", "--rehearse", tmp_path / "s")
    assert printed["process_count"] == 1
    assert printed["left_out"] == []
    assert run("verify", "--rehearse", "--deep", tmp_path / "s").returncode == 2
    assert run("verify", "--timeout", "3", tmp_path / "s").returncode == 2
    (job.folder / "stderr").unlink()  # the job has it open
    failed = run("verify", "--rehearse", tmp_path / "s", "--json")
    assert failed.returncode == 5
    assert json.loads(failed.stdout)["data"]["cause_code"] == "GPUCR-FILE-MISSING"
    (tmp_path / "s" / "images" / "files.img").write_bytes(b"x")
    assert run("verify", "--rehearse", tmp_path / "s").returncode == 5
    assert job.go_on() == "ok"


def test_the_gpu_part_of_a_container_is_refused(tmp_path: Path) -> None:
    snapshot = samples.committed(tmp_path / "s")
    without_images = replace(snapshot, manifest=structs.replace(snapshot.manifest, criu_options=None))
    with pytest.raises(InvalidRequest, match="GPU part"):
        gpucr.rehearse(without_images)


def test_a_machine_that_cannot_show_its_files_so(
    start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is no failure of the snapshot's."""
    job = start("done()\nstep()\ndone()\n")
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    monkeypatch.setattr("gpucr.operations.rehearse.view_for", lambda *_: View((), (), (), ("/missing",)))
    with pytest.raises(Unsupported) as refused:
        gpucr.rehearse(tmp_path / "s")
    assert refused.value.code == "GPUCR-NO-REHEARSAL"
    assert job.go_on() == "ok"


# --- dumps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["folder", "store"])
@pytest.mark.parametrize("leave_running", [False, True], ids=["ended", "left running"])
def test_a_dump_with_a_rehearsal(place: str, leave_running: bool, start: StartJob, tmp_path: Path) -> None:
    to = str(tmp_path / "s")
    if place == "store":
        gpucr.init_store(tmp_path / "store")
        to = f"{tmp_path}/store#one"
    job = start("done()\nstep()\ndone()\n")
    report = gpucr.dump(job.pid, to, rehearse=True, leave_running=leave_running)
    assert report.rehearsal is not None
    assert report.rehearsal.processes == 1
    if not leave_running:
        job.reap()
        gpucr.restore(to)
    assert job.go_on() == "ok"


@pytest.mark.parametrize("place", ["folder", "store"])
@pytest.mark.parametrize("leave_running", [False, True], ids=["ended", "left running"])
def test_a_dump_whose_rehearsal_fails(
    place: str, leave_running: bool, start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job keeps running, and there is no snapshot."""
    to = str(tmp_path / "s")
    if place == "store":
        gpucr.init_store(tmp_path / "store")
        to = f"{tmp_path}/store#one"
    job = start("done()\nstep()\ndone()\nstep()\ndone()\n")
    with monkeypatch.context() as broken:
        broken.setattr(CheckRestored, "_differences", lambda *_: ["it is another one"])
        with pytest.raises(RehearsalFailed, match="it is another one"):
            gpucr.dump(job.pid, to, rehearse=True, leave_running=leave_running)
    assert job.go_on() == "ok"
    assert not (tmp_path / "s").exists()
    if place == "store":
        assert gpucr.list_snapshots(tmp_path / "store").snapshots == ()
    gpucr.dump(job.pid, to, rehearse=True, leave_running=True)
    assert job.go_on() == "ok"


def test_a_dump_of_a_cuda_job(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "8")
    assert job.ask() == 101
    printed = run_json("dump", job.pid, "--to", tmp_path / "s", "--rehearse")
    assert printed["rehearsal"]["checked_bytes"] >= 8 << 20
    assert [phase["name"] for phase in printed["rehearsal"]["phases"]][-3:] == ["restore", "compare", "end"]
    job.reap()
    gpucr.restore(tmp_path / "s")
    assert job.ask() == 102


def test_a_dry_run_names_the_rehearsal(start: StartJob, tmp_path: Path) -> None:
    job = start("done()\nstep()\ndone()\n")
    steps = gpucr.plan_dump(job.pid, tmp_path / "s", rehearse=True).steps
    assert any("rehearse" in step for step in steps)
    assert not any("rehearse" in step for step in gpucr.plan_dump(job.pid, tmp_path / "s").steps)
    assert job.go_on() == "ok"


def test_a_dump_of_two_trees(start: StartJob, tmp_path: Path) -> None:
    """They are stopped as a whole, and are so during the rehearsal."""
    jobs = [start("done()\nstep()\ndone()\n") for _ in range(2)]
    report = gpucr.dump(gpucr.JobSelector(*(job.pid for job in jobs)), tmp_path / "s", rehearse=True)
    assert report.rehearsal is not None
    assert report.rehearsal.processes == 2
    for job in jobs:
        job.reap()
    gpucr.restore(tmp_path / "s")
    assert [job.go_on() for job in jobs] == ["ok", "ok"]
