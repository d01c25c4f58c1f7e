"""Jobs restored without a sandbox have a keeper too, and a killed gpucr leaves no job without a record."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.errors import BrokenInstall, InvalidRequest
from gpucr.jobs import registered, sandbox
from gpucr.jobs.record import JobRecord
from gpucr.linux import processes
from gpucr.operations import launch
from gpucr.sim import build as simulator
from gpucr.undo.events import Progress
from tests.command import python
from tests.counter import CounterFactory, processes_in, wait_until
from tests.sandboxed import SandboxedCounter, start_counter, wait_ready
from tests.scenarios.test_killed import killed
from tests.storm import later

pytestmark = pytest.mark.usefixtures("state_home")

PROGRAM = """
import itertools, os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
for number in itertools.count():
    print(number, flush=True)
    time.sleep(0.005)
"""


def start(folder: Path, **options: Any) -> JobRecord:
    command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    record = launch.run_job(command, name="job", cwd=folder, **{"isolate": False, **options}).record
    assert_goes_on(record)
    return record


def assert_goes_on(record: JobRecord) -> None:
    before = record.log.stat().st_size
    wait_until(lambda: record.log.stat().st_size > before + 10, "the job to count")


def state() -> tuple[str, int | None, int | None]:
    found = registered.registry().find("job").state
    return found.word, found.exit_code, found.signal


def parent_of(pid: int) -> int:
    stat = processes.read_stat(pid)
    assert stat is not None
    return stat.parent_pid


def run_and_be_killed(code: str, *arguments: object) -> None:
    """Run Python that ends by SIGKILL."""
    done = python("import os, signal, sys, gpucr\n" + code, *arguments)
    assert done.returncode == -signal.SIGKILL, done.stderr


KILLED_AFTER = """
def killed_after(owner, name):
    real = getattr(owner, name)
    def wrapped(*arguments, **keywords):
        real(*arguments, **keywords)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, wrapped)
"""


# --- how a restored job ended --------------------------------------------------------------------------------------


@pytest.mark.criu
@pytest.mark.parametrize(
    ("number", "ended"), [(signal.SIGTERM, ("ended", 7, None)), (signal.SIGKILL, ("ended", None, 9))]
)
def test_the_exit_status_of_a_restored_job_is_recorded(
    folder: Path, tmp_path: Path, number: signal.Signals, ended: tuple[str, int | None, int | None]
) -> None:
    start(folder)
    gpucr.dump("job", tmp_path / "s")
    report = gpucr.restore(tmp_path / "s")
    record = registered.registry().find("job").record
    assert record is not None
    assert record.keeper is not None
    assert parent_of(report.pid) == record.keeper.pid
    assert_goes_on(record)
    os.kill(report.pid, number)
    wait_until(lambda: state() == ended, "its end to be known")
    wait_until(lambda: processes.read_stat(report.pid) is None, "it to be collected")
    wait_until(lambda: processes.read_stat(record.keeper.pid) is None, "the keeper to end")  # type: ignore[union-attr]


@pytest.mark.criu
def test_dumped_again_after_a_restore(folder: Path, tmp_path: Path) -> None:
    record = start(folder)
    for number in range(2):
        gpucr.dump("job", tmp_path / str(number))
        assert state()[0] == "dumped"
        gpucr.restore(tmp_path / str(number))
        assert_goes_on(record)


@pytest.mark.criu
def test_a_job_gpucr_did_not_start_is_reaped_too(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "2", "--fork", "1")
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    report = gpucr.restore(tmp_path / "s")
    keeper = parent_of(report.pid)
    assert sandbox.keeper_root(keeper) is not None
    assert gpucr.job_states(keeper)[0].process.pid == report.pid, "the keeper's pid stands for the job"
    pids = job.processes()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the counter's child ends with its parent
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(processes.read_stat, [*pids, keeper])), "all to end, and no zombie to be left")


@contextlib.contextmanager
def killed_on_failure(process: subprocess.Popen[str]) -> Iterator[None]:
    """Leaving a Popen's block waits for its end."""
    try:
        yield
    except BaseException:
        process.kill()
        raise


SCRIPT = """
"$1" --port 0 > stdout &
echo $!
read line
wait 2> waited
"$2" -m gpucr restore "$3" --json > report
echo $?
read line
"""


@pytest.mark.criu
@pytest.mark.parametrize("flags", ["-c", "-mc"], ids=["in the script's process group", "in one of its own"])
def test_a_scripts_job_is_restored_into_its_session(folder: Path, tmp_path: Path, flags: str) -> None:
    """Stopped, in a process group without a parent outside in that session, the job would be sent SIGHUP."""
    program = str(simulator.build() / "counter")
    with (
        subprocess.Popen(
            ["bash", flags, SCRIPT, "script", program, sys.executable, str(tmp_path / "s")],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as script,
        killed_on_failure(script),
    ):
        assert script.stdin is not None
        assert script.stdout is not None
        pid = int(script.stdout.readline())
        port = wait_ready(folder / "stdout")
        gpucr.dump(pid, tmp_path / "s")
        script.stdin.write("restore\n")
        script.stdin.flush()
        assert script.stdout.readline() == "0\n", (folder / "report").read_text()
        with SandboxedCounter(pid, port) as job:
            assert job.ask() == 101
        keeper = parent_of(pid)
        assert sandbox.keeper_root(keeper) is not None
        assert os.getsid(pid) == os.getsid(keeper) == script.pid
        assert os.getpgid(keeper) not in (os.getpgid(pid), script.pid)
        script.stdin.write("end\n")
    with SandboxedCounter(pid, port) as job:
        assert job.ask() == 102, "nor does the end of the session end it"
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(processes.read_stat, [pid, keeper])), "all to end, and no zombie to be left")


# --- a restore that fails or is killed -----------------------------------------------------------------------------


@pytest.mark.criu
@pytest.mark.parametrize(("event", "phase"), [later("begin", "criu"), later("end", "criu"), ("begin", "keep")])
def test_gpucr_is_killed_in_a_restore_without_cuda(folder: Path, tmp_path: Path, event: str, phase: str) -> None:
    """There is no guard for it: the keeper ends what is below it."""
    record = start(folder)
    gpucr.dump("job", tmp_path / "s")
    killed(event, phase, "restore", tmp_path / "s")
    wait_until(lambda: not processes_in(folder), "what was restored to end")
    assert state()[0] == "dumped"
    gpucr.restore(tmp_path / "s")
    assert_goes_on(record)


@pytest.mark.criu
@pytest.mark.parametrize(
    ("event", "phase"), [later("begin", "keeper"), later("begin", "criu"), later("end", "criu"), ("end", "release")]
)
def test_gpucr_is_killed_in_a_restore_with_cuda(folder: Path, tmp_path: Path, event: str, phase: str) -> None:
    with start_counter(folder, "--mib", "8", "--fork", "1", isolate=False):
        gpucr.dump("counter", tmp_path / "s")
    killed(event, phase, "restore", tmp_path / "s")
    wait_until(lambda: not processes_in(folder), "what was restored to end")
    gpucr.restore(tmp_path / "s")
    assert len(processes_in(folder)) == 2


@pytest.mark.criu
def test_the_keeper_is_killed_before_it_adopts_the_job(folder: Path, tmp_path: Path) -> None:
    record = start(folder)
    gpucr.dump("job", tmp_path / "s")
    before = registered.registry().find("job").record

    def kill_keeper(progress: Progress) -> None:
        if (progress.event, progress.phase) == ("begin", "keep"):
            os.kill(parent_of(processes_in(folder)[0]), signal.SIGKILL)

    with pytest.raises(BrokenInstall, match="the keeper process of the job ended"):
        gpucr.restore(tmp_path / "s", on_progress=kill_keeper)
    assert processes_in(folder) == []
    assert registered.registry().find("job").record == before
    gpucr.restore(tmp_path / "s")
    assert_goes_on(record)


@pytest.mark.criu
@pytest.mark.parametrize("isolate", [later(False), True])
def test_killed_between_the_record_and_the_keeper(folder: Path, tmp_path: Path, isolate: bool) -> None:
    record = start(folder, isolate=isolate)
    gpucr.dump("job", tmp_path / "s")
    code = (
        "from gpucr.jobs.registered import RestoredName\n"
        "killed_after(RestoredName, 'register_or_warn')\n"
        "gpucr.restore(sys.argv[1])"
    )
    run_and_be_killed(KILLED_AFTER + code, tmp_path / "s")
    wait_until(lambda: not processes_in(folder), "what was restored to end")
    wait_until(lambda: state()[0] == "lost", "the keeper to end")
    with pytest.raises(InvalidRequest, match="does not run any more") as caught:
        gpucr.suspend("job")
    assert f"`gpucr restore {tmp_path / 's'}`" in str(caught.value.hint)
    assert gpucr.restore(tmp_path / "s").name == "job"
    assert_goes_on(record)


@pytest.mark.criu
def test_a_job_with_a_parent_death_signal(folder: Path, tmp_path: Path) -> None:
    """Its parent is CRIU for a moment, as after every restore: it ends, before gpucr has finished or right after."""
    code = "import ctypes; assert ctypes.CDLL(None).prctl(1, 9, 0, 0, 0) == 0  # PR_SET_PDEATHSIG\n" + PROGRAM
    command = [sys.executable, "-I", "-S", "-c", code]
    record = launch.run_job(command, name="job", cwd=folder, isolate=False).record
    assert_goes_on(record)
    gpucr.dump("job", tmp_path / "s")
    with contextlib.suppress(gpucr.JobChanged):
        gpucr.restore(tmp_path / "s")
    wait_until(lambda: processes_in(folder) == [], "the job to end")
    wait_until(lambda: state()[0] in ("dumped", "ended"), "its keeper to note it")


# --- a start that is killed ------------------------------------------------------------------------------------------


def test_killed_between_the_record_and_the_start(folder: Path) -> None:
    code = (
        "from gpucr.jobs.registry import Reservation\n"
        "killed_after(Reservation, 'register')\n"
        "gpucr.run_job(['touch', 'ran'], name='job', cwd=sys.argv[1], isolate=False)"
    )
    run_and_be_killed(KILLED_AFTER + code, folder)
    wait_until(lambda: state()[0] == "lost", "its processes to end")
    assert not (folder / "ran").exists()
    start(folder)
    assert state()[0] == "running"


def test_killed_right_after_the_start(folder: Path) -> None:
    code = (
        "from gpucr.jobs import sandbox\n"
        "killed_after(sandbox, 'start')\n"
        "gpucr.run_job(['sleep', '1000'], name='job', cwd=sys.argv[1], isolate=False)"
    )
    run_and_be_killed(KILLED_AFTER + code, folder)
    assert state()[0] == "running"
    assert [registered.resolve_pid("job")] == processes_in(folder)


# --- a dump that is killed -------------------------------------------------------------------------------------------


@pytest.mark.criu
@pytest.mark.parametrize("isolate", [False, True])
def test_killed_after_the_job_was_ended_for_its_snapshot(folder: Path, tmp_path: Path, isolate: bool) -> None:
    record = start(folder, isolate=isolate)
    killed("end", "dump", "dump", "job", tmp_path / "s")
    wait_until(lambda: state()[0] == "dumped", "the job to be gone")
    assert processes_in(folder) == []
    gpucr.restore(tmp_path / "s")
    assert_goes_on(record)


@pytest.mark.criu
def test_killed_between_the_commit_and_the_end_of_the_job(folder: Path, tmp_path: Path) -> None:
    """CRIU finds its socket closed and lets the job continue: that counts, and not the record in the registry."""
    record = start(folder)
    code = "from gpucr.jobs.registered import DumpNote\nkilled_after(DumpNote, 'write')\ngpucr.dump('job', sys.argv[1])"
    run_and_be_killed(KILLED_AFTER + code, tmp_path / "s")
    assert_goes_on(record)
    assert state()[0] == "running"
    assert gpucr.Snapshot.open(tmp_path / "s").manifest.launch is not None
    os.kill(record.pid, signal.SIGTERM)
    wait_until(lambda: state() == ("ended", 7, None), "its own end, and not that of a dump")
