"""The guard: if gpucr is killed at any moment of an operation, the job is brought back to how it was found.

A child process stands for that gpucr: it makes a guard, changes the job by hand, and kills itself.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpucr.criu.recovery import EndDump, EndRestore, EndRestored, RemoveGhosts, RemoveImages
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import BrokenInstall, Unsupported
from gpucr.gpu_state.recovery import BringBack, CallAfterRestore, DetachedStaging, EndStop, ForgetWork, GangProtection
from gpucr.jobs.recovery import CloseToTracers, EndJob, EndSandbox
from gpucr.linux import own_python, processes
from gpucr.linux.claims import claimed
from gpucr.linux.cut_back import CutOff
from gpucr.model import CudaState, GangMember, ProcessId, StagedExtent
from gpucr.network.recovery import EndRepair, FilterPlace, ForgetKept, LowerTcpMemory, RemoveFilters
from gpucr.snapshot.recovery import DiscardFolder, RemoveWorkingFolder
from gpucr.snapshot.shared_files import MadeFile
from gpucr.surroundings.recovery import PutBackCuts, RemoveLinkRemaps, RemoveSharedFiles, RemoveSocketFolders
from gpucr.undo import guard as guards
from gpucr.undo.guard import Guard
from gpucr.undo.logs import append_to_log
from gpucr.undo.protection import Protection
from gpucr.undo.recovery import Action, Record, decode, encode, entry, load
from tests import command
from tests.children import identity, python, sleeper
from tests.conftest import skip_or_fail
from tests.counter import Counter, CounterFactory, processes_of_this_test, wait_until
from tests.docs.pages import SOURCES
from tests.storm import later, sample

RUNNING, LOCKED, CHECKPOINTED = CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED
Environment = Callable[..., dict[str, str]]
Operation = Callable[..., int]

_PRELUDE = """
import contextlib, os, signal, sys
from pathlib import Path
from gpucr.criu.engine import Criu
from gpucr.criu.install import find_criu
from gpucr.criu.options import RestoreOptions, choose_dump_options
from gpucr.criu.recovery import EndDump, EndRestore, EndRestored
from gpucr.criu.remains import task_pids
from gpucr.gang import Gang
from gpucr.gang.threads import GangThreads
from gpucr.gpu_state.recovery import BringBack, GangProtection
from gpucr.jobs import selection
from gpucr.linux import processes
from gpucr.linux.claims import claimed
from gpucr.model import *
from gpucr.snapshot.folder import UnfinishedSnapshot
from gpucr.snapshot.recovery import discard_folder
from gpucr.undo.protection import Protection

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def protect(claims=(), tree=()):
    global protection
    protection = Protection(claims, tree)
    protection.__enter__()
    print(protection._guard.pid, flush=True)

pid, folder = int(sys.argv[1]), Path(sys.argv[2])
"""

_ON_JOB = """
found, claims = selection.find_job(pid), claimed([pid])
protect(claims.__enter__(), found.job.processes)
members, driver = found.job.gang, found.driver
gang = Gang(driver, members)
guarded = GangProtection(protection)
guarded.members(members)
guarded.stopped([process.id for process in found.job.processes])
"""

_FREEZE = """
guarded.restore_threads(gang.restore_threads())
threads = GangThreads()
gang.lock()
threads.hold(gang.restore_threads())
gang.checkpoint()
threads.stop()
"""

_CRIU = """
snapshot = UnfinishedSnapshot(folder)
snapshot.create()
protection.protect(*discard_folder(snapshot))
options = choose_dump_options(found.job.pids, leave_running=False)
def on_start(criu):
    protection.protect(EndDump(criu, "manifest.json"), [snapshot.held.fd])
def on_notify(hook, _):
    if hook == {hook!r}:
        {action}
Criu(find_criu()).dump(
    pid, snapshot.images, options, log_path=folder.parent / "log", on_start=on_start, on_notify=on_notify
)
"""


@pytest.fixture(autouse=True)
def log(state_home: Path) -> Path:
    """The file in which a guard writes what it has done."""
    return state_home / "gpucr" / "log" / "guard.log"


@pytest.fixture
def root_only() -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "taking staging out of a process needs root")


@pytest.fixture
def operation(tmp_path: Path) -> Iterator[Operation]:
    """Run code that makes a guard and then is killed by SIGKILL. Returns the guard's pid; it may still be at work."""
    started: list[ProcessId] = []

    def run(pid: int, *code: str, wait: bool = True) -> int:
        done = command.python(_PRELUDE + "".join(map(textwrap.dedent, code)), pid, tmp_path / "s")
        assert done.returncode == -signal.SIGKILL, done.stderr
        guard = ProcessId(int(done.stdout.split()[0]), 0)
        found = processes.read_stat(guard.pid)
        started.append(ProcessId(guard.pid, found.start_time_ticks if found is not None else 0))
        if wait:
            wait_until(lambda: not processes.is_alive(started[-1]), "the guard to end")
        return guard.pid

    yield run
    for guard in started:
        wait_until(lambda guard=guard: not processes.is_alive(guard), "the guard to end")  # type: ignore[misc]


def assert_untouched(pid: int) -> None:
    for tid in processes.threads(pid):
        found = processes.read_stat(tid)
        assert found is None or found.status not in "Tt", f"thread {tid} of {pid} is stopped"
        assert processes.tracer_pid(tid) == 0, f"thread {tid} of {pid} is traced"


def assert_as_found(job: Counter, driver: CudaDriver, log: Path) -> None:
    assert "its job is as it was found" in log.read_text()
    for pid in job.processes():
        assert_untouched(pid)
        assert driver.state(pid) is RUNNING
        wait_until(partial(_is_free, pid), "the last thread of the guard to end")
    assert job.ask() == 101
    assert job.send("verify") == "ok"


# --- killed in each state --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "",
        "gang.lock()",
        "gang.lock(); gang.checkpoint()",
        "gang.lock(); gang.checkpoint(); gang.restore(down_to=lambda member: member.found)",
        "gang.lock(); gang.checkpoint(); gang.return_to_found()",
    ],
    ids=["before", "locked", "checkpointed", "restored", "unlocked"],
)
def test_a_running_job_runs_again(
    counter: CounterFactory, driver: CudaDriver, operation: Operation, log: Path, code: str
) -> None:
    job = counter("--mib", "4", "--fork", "1")
    operation(job.pid, _ON_JOB, code, "\ndie()")
    assert_as_found(job, driver, log)


@pytest.mark.parametrize("code", ["", "driver.restore(pid)", "driver.restore(pid); driver.unlock(pid)"])
def test_a_suspended_job_is_suspended_again(
    counter: CounterFactory, driver: CudaDriver, operation: Operation, code: str
) -> None:
    job = counter("--mib", "4")
    driver.lock(job.pid)
    driver.checkpoint(job.pid)
    operation(job.pid, _ON_JOB, code, "\ndie()")
    assert driver.state(job.pid) is CHECKPOINTED
    driver.restore(job.pid)
    driver.unlock(job.pid)
    assert job.ask() == 101
    assert job.send("verify") == "ok"


@pytest.mark.parametrize("code", ["", "driver.checkpoint(pid)", "driver.unlock(pid)"])
def test_a_locked_job_is_locked_again(
    counter: CounterFactory, driver: CudaDriver, operation: Operation, code: str
) -> None:
    job = counter()
    driver.lock(job.pid)
    operation(job.pid, _ON_JOB, code, "\ndie()")
    assert driver.state(job.pid) is LOCKED


@pytest.mark.parametrize("action", ["lock", "checkpoint", "restore", "unlock"])
def test_killed_while_the_driver_is_at_work(
    counter: CounterFactory,
    driver: CudaDriver,
    operation: Operation,
    log: Path,
    sim_environment: Environment,
    tmp_path: Path,
    action: str,
) -> None:
    job = counter("--mib", "4", env=sim_environment(faults=f"{action}#1=until:{tmp_path / 'go'}"))
    kill_in = """
    import threading
    for name in ("lock", "checkpoint", "restore", "unlock"):
        call = threading.Thread(target=getattr(driver, name), args=(pid,), daemon=True)
        call.start()
        if name == ACTION:
            call.join(0.2)
            assert call.is_alive()
            die()
        call.join()
    """.replace("ACTION", repr(action))
    operation(job.pid, _ON_JOB, kill_in, wait=False)
    (tmp_path / "go").touch()
    wait_until(lambda: _is_free(job.pid), "the guard to let go of it")
    assert_as_found(job, driver, log)


def test_killed_while_a_lock_waits_for_the_gpu(
    counter: CounterFactory, driver: CudaDriver, operation: Operation, log: Path
) -> None:
    job = counter()
    assert job.send("busy 600000") == "busy"
    kill_in = """
    import threading
    call = threading.Thread(target=driver.lock, args=(pid,), daemon=True)
    call.start()
    call.join(0.1)
    assert call.is_alive()
    die()
    """
    operation(job.pid, _ON_JOB, kill_in)
    assert_as_found(job, driver, log)


def test_killed_with_threads_held(counter: CounterFactory, driver: CudaDriver, operation: Operation, log: Path) -> None:
    job = counter("--mib", "4")
    operation(job.pid, _ON_JOB, _FREEZE.replace("threads.stop()", "die()"))
    assert_as_found(job, driver, log)


def test_killed_with_the_job_stopped(
    counter: CounterFactory, driver: CudaDriver, operation: Operation, log: Path
) -> None:
    job = counter("--mib", "4", "--fork", "1", "--cpu-parent")
    operation(job.pid, _ON_JOB, _FREEZE, "os.kill(pid, signal.SIGSTOP)\ndie()")
    assert "its job is as it was found" in log.read_text()
    for pid in job.processes():
        assert_untouched(pid)
    (child,) = (pid for pid in job.processes() if pid != job.pid)
    assert driver.state(child) is RUNNING
    assert job.ask() == 101


def test_no_thread_but_the_drivers_runs_before_device_memory_is_back(
    counter: CounterFactory,
    driver: CudaDriver,
    operation: Operation,
    log: Path,
    sim_environment: Environment,
    tmp_path: Path,
) -> None:
    job = counter("--mib", "4", env=sim_environment(faults=f"restore#1=until:{tmp_path / 'go'}"))
    tid = driver.restore_thread_id(job.pid)
    others = [thread for thread in processes.threads(job.pid) if thread != tid]
    guard = operation(job.pid, _ON_JOB, _FREEZE, "die()", wait=False)
    wait_until(lambda: _status(tid) == "S", "the driver's thread to continue")
    for thread in others:
        assert processes.thread_group_leader(processes.tracer_pid(thread)) == guard
    assert driver.state(job.pid) is CHECKPOINTED
    (tmp_path / "go").touch()
    wait_until(lambda: _is_free(job.pid), "the guard to let go of it")
    assert_as_found(job, driver, log)


def test_an_ended_job_needs_no_undo_but_counts_as_changed(
    counter: CounterFactory, operation: Operation, log: Path
) -> None:
    job = counter()
    operation(job.pid, _ON_JOB, "gang.lock()\nos.kill(pid, signal.SIGKILL)\ndie()")
    assert f"its job has lost processes: process {job.pid} " in log.read_text()
    assert "as it was found" not in log.read_text()
    assert not job.processes()


def test_a_lost_process_is_named_and_the_others_run(
    counter: CounterFactory, driver: CudaDriver, operation: Operation, log: Path
) -> None:
    job = counter("--fork", "1")
    (child,) = (pid for pid in job.processes() if pid != job.pid)
    operation(job.pid, _ON_JOB, f"gang.lock()\nos.kill({child}, signal.SIGKILL)\ndie()")
    assert f"its job has lost processes: process {child} " in log.read_text()
    assert f"process {job.pid} " not in log.read_text()
    assert driver.state(job.pid) is RUNNING
    assert job.ask() == 101


def test_a_failed_undo_is_reported(
    counter: CounterFactory, driver: CudaDriver, operation: Operation, log: Path, sim_environment: Environment
) -> None:
    job = counter(env=sim_environment(faults="unlock=999"))
    operation(job.pid, _ON_JOB, "gang.lock()\ndie()")
    assert "bringing its job back failed: DriverError" in log.read_text()
    assert "999" in log.read_text()
    assert driver.state(job.pid) is LOCKED


def test_the_claim_is_kept_until_the_job_is_back(
    counter: CounterFactory, driver: CudaDriver, operation: Operation, sim_environment: Environment, tmp_path: Path
) -> None:
    job = counter(env=sim_environment(faults=f"unlock#1=until:{tmp_path / 'go'}"))
    operation(job.pid, _ON_JOB, "gang.lock()\ndie()", wait=False)
    assert driver.state(job.pid) is LOCKED
    with pytest.raises(Unsupported, match="another gpucr"), claimed([job.pid]):
        pass
    (tmp_path / "go").touch()
    wait_until(lambda: driver.state(job.pid) is RUNNING, "the job to run")
    wait_until(lambda: _is_free(job.pid), "the guard to let go of it")


def _status(tid: int) -> str:
    found = processes.read_stat(tid)
    assert found is not None
    return found.status


def _is_free(pid: int) -> bool:
    with contextlib.suppress(Unsupported), claimed([pid]):
        return True
    return False


# --- CRIU at work ----------------------------------------------------------------------------------------------


@pytest.mark.criu
@pytest.mark.parametrize("hook", [later("pre-dump"), "query-ext-files", later("post-dump")])
def test_killed_at_a_hook_of_the_dump(
    counter: CounterFactory, driver: CudaDriver, operation: Operation, log: Path, tmp_path: Path, hook: str
) -> None:
    job = counter("--mib", "4", "--fork", "1")
    operation(job.pid, _ON_JOB, _FREEZE, _CRIU.format(hook=hook, action="die()"))
    assert_as_found(job, driver, log)
    assert not (tmp_path / "s").exists()


@pytest.mark.criu
def test_killed_while_criu_writes(
    counter: CounterFactory, driver: CudaDriver, operation: Operation, log: Path, tmp_path: Path
) -> None:
    job = counter("--mib", "256")
    die_later = """
        import threading
        def watch():
            while sum(file.stat().st_size for file in snapshot.images.iterdir()) < 8 << 20:
                pass
            die()
        threading.Thread(target=watch).start()
    """
    operation(job.pid, _ON_JOB, _FREEZE, _CRIU.format(hook="pre-dump", action=die_later.strip()))
    assert_as_found(job, driver, log)
    assert not (tmp_path / "s").exists()


@pytest.mark.criu
def test_killed_after_the_commit_lets_criu_end_the_job(
    counter: CounterFactory, operation: Operation, log: Path, tmp_path: Path
) -> None:
    """The manifest is there and the hook is answered: the guard neither stops CRIU nor touches the snapshot."""
    job = counter("--mib", "4")
    commit = """(folder / "manifest.json").write_text("{}")"""
    operation(job.pid, _ON_JOB, _FREEZE, _CRIU.format(hook="post-dump", action=commit), "die()")
    assert "its job is as it was found" in log.read_text()
    job.reap()
    assert not job.processes()
    assert (tmp_path / "s" / "manifest.json").exists()
    assert list((tmp_path / "s" / "images").iterdir())


@pytest.mark.criu
def test_killed_between_the_commit_and_the_answer_to_criu(
    counter: CounterFactory, driver: CudaDriver, operation: Operation, log: Path, tmp_path: Path
) -> None:
    job = counter("--mib", "4")
    commit = """(folder / "manifest.json").write_text("{}"); die()"""
    operation(job.pid, _ON_JOB, _FREEZE, _CRIU.format(hook="post-dump", action=commit))
    assert_as_found(job, driver, log)
    assert (tmp_path / "s" / "manifest.json").exists()


@pytest.mark.criu
@pytest.mark.parametrize(
    "hook", sample(["pre-restore", "post-restore", "pre-resume", "post-resume", "after", "known"], 5)
)
def test_a_killed_restore_leaves_nothing(
    counter: CounterFactory, operation: Operation, log: Path, tmp_path: Path, hook: str
) -> None:
    job = counter("--mib", "4", "--fork", "1")
    pids = job.processes()
    operation(
        job.pid,
        _ON_JOB,
        _FREEZE,
        _CRIU.format(hook="none", action="pass"),
        "protection.__exit__(None, None, None)\ndie()",
    )
    job.reap()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the pids to become free")
    restore = f"""
    protect()
    def on_start(criu):
        protection.protect(EndRestore((criu,), task_pids(folder / "images")))
    def on_notify(hook, _):
        if hook == {hook!r}:
            die()
    root = Criu(find_criu()).restore(
        folder / "images", RestoreOptions(False, leave_stopped=True), log_path=folder.parent / "log",
        on_start=on_start, on_notify=on_notify,
    )
    if {hook!r} == "known":
        protection.protect(EndRestored(tuple(process.id for process in processes.tree(root))))
        protection.withdraw(EndRestore)
    die()
    """
    operation(job.pid, restore)
    assert "its job is as it was found" in log.read_text()
    wait_until(lambda: not job.processes(), "the half-restored processes to end")
    assert list((tmp_path / "s" / "images").iterdir())


# --- device memory in a file that gpucr holds ------------------------------------------------------------------

_STAGED = """
from gpucr.gpu_state import staging
from gpucr.linux.tmpfs import StagingFile

free = gang.restore_threads()
files = {each: StagingFile.create(0) for each in free}
captures = [staging.Capture(each, tid, files[each]) for each, tid in free.items()]
guarded.restore_threads(free)
threads = GangThreads()
gang.lock()
threads.hold(free)
for capture in captures:
    capture.begin()
    capture.wait_started()
gang.checkpoint()
for capture in captures:
    capture.finish()
    assert capture.extents, capture.reason
threads.stop()
guarded.detached(
    {capture.pid: capture.extents for capture in captures}, {each: file.fd for each, file in files.items()}
)
"""

_DETACH = """
for capture in captures:
    staging.detach(free[capture.pid], capture.extents)
"""

_ATTACH = """
threads.hold_again()
for capture in captures:
    staging.attach(free[capture.pid], files[capture.pid].fd, capture.extents)
"""


@pytest.mark.parametrize(
    "code",
    [
        later([]),
        [_DETACH],
        later([_DETACH, "threads.hold_again()"]),
        [_DETACH, _ATTACH],
        later([_DETACH, _ATTACH, "gang.return_to_found()"]),
    ],
    ids=["before", "detached", "held", "attached", "restored"],
)
def test_device_memory_in_a_file_is_put_back(
    root_only: None, counter: CounterFactory, driver: CudaDriver, operation: Operation, log: Path, code: list[str]
) -> None:
    job = counter("--mib", "4", "--fork", "1")
    operation(job.pid, _ON_JOB, _STAGED, *code, "\ndie()")
    assert_as_found(job, driver, log)
    for pid in job.processes():  # mapped over what lies there by now, it would destroy it
        assert "gpucr-staging" not in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.criu
@pytest.mark.parametrize("hook", [later("pre-dump"), "query-ext-files", later("post-dump")])
def test_device_memory_in_a_file_is_put_back_after_criu(
    counter: CounterFactory, driver: CudaDriver, operation: Operation, log: Path, tmp_path: Path, hook: str
) -> None:
    job = counter("--mib", "4", "--fork", "1")
    operation(job.pid, _ON_JOB, _STAGED, _DETACH, _CRIU.format(hook=hook, action="die()"))
    assert_as_found(job, driver, log)
    assert not (tmp_path / "s").exists()


def test_device_memory_is_kept_until_it_can_be_put_back(
    root_only: None, counter: CounterFactory, driver: CudaDriver, operation: Operation, log: Path
) -> None:
    """A debugger that came at the wrong moment: the guard keeps the data until it has gone."""
    job = counter("--mib", "4")
    debugger = """
    import ctypes, subprocess
    code = "import ctypes, signal, sys; seize = 0x4206; libc = ctypes.CDLL(None)\\n"
    code += "print(libc.ptrace(seize, int(sys.argv[1]), None, None), flush=True); signal.pause()"
    command = [sys.executable, "-c", code, str(free[pid])]
    debugger = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert debugger.stdout.readline() == "0\\n"
    die()
    """
    guard = operation(job.pid, _ON_JOB, _STAGED, _DETACH, debugger, wait=False)
    wait_until(lambda: log.exists() and "cannot be put back yet" in log.read_text(), "the guard to try")
    tracers = {processes.tracer_pid(tid) for tid in processes.threads(job.pid)} - {0}
    (debugger_pid,) = {processes.thread_group_leader(tracer) for tracer in tracers} - {guard}
    os.kill(debugger_pid, signal.SIGKILL)
    wait_until(lambda: "as it was found" in log.read_text(), "the guard to succeed")
    wait_until(lambda: _is_free(job.pid), "the guard to let go of it")
    assert_as_found(job, driver, log)


# --- the folder ------------------------------------------------------------------------------------------------

_FOLDER = """
protect()
snapshot = UnfinishedSnapshot(folder)
snapshot.create()
protection.protect(*discard_folder(snapshot))
(folder / "images" / "core-1.img").write_text("an image")
(folder / ".manifest.json.unfinished").write_text("{")
"""


def test_an_unfinished_folder_is_removed(operation: Operation, tmp_path: Path) -> None:
    operation(1, _FOLDER, "die()")
    assert not (tmp_path / "s").exists()


def test_an_existing_folder_is_emptied_again(operation: Operation, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o750)
    operation(1, _FOLDER, "die()")
    assert list((tmp_path / "s").iterdir()) == []
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o750


def test_a_snapshot_is_not_removed(operation: Operation, tmp_path: Path) -> None:
    operation(1, _FOLDER, """(folder / "manifest.json").write_text("{}")\ndie()""")
    assert sorted(path.name for path in (tmp_path / "s").iterdir())[1:] == ["images", "manifest.json"]
    assert (tmp_path / "s" / "images" / "core-1.img").exists()


def test_a_folder_with_foreign_files_is_not_removed(operation: Operation, tmp_path: Path, log: Path) -> None:
    operation(1, _FOLDER, """(folder / "notes.txt").write_text("mine")\ndie()""")
    assert (tmp_path / "s" / "notes.txt").read_text() == "mine"
    assert "failed" in log.read_text()


# --- the guard itself ------------------------------------------------------------------------------------------


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard() as guard:
        guard.wait_ready()
        yield guard


def test_a_dismissed_guard_does_nothing_and_exits(counter: CounterFactory, driver: CudaDriver, log: Path) -> None:
    job = counter()
    with Protection() as protection:
        GangProtection(protection).members([GangMember(identity(job.pid), RUNNING)])
        driver.lock(job.pid)
    assert not Path(f"/proc/{protection._guard.pid}").exists()
    assert driver.state(job.pid) is LOCKED
    assert not log.exists()


def test_dismissed_in_any_state() -> None:
    at_once = Guard()
    at_once.dismiss()
    at_once.dismiss()
    killed = Guard()
    killed.wait_ready()
    os.kill(killed.pid, signal.SIGKILL)
    killed.dismiss()
    stopped = Guard()
    os.kill(stopped.pid, signal.SIGSTOP)
    stopped.dismiss()
    assert not any(Path(f"/proc/{guard.pid}").exists() for guard in (at_once, killed, stopped))


def test_a_killed_guard_is_noticed_at_the_next_update(guard: Guard) -> None:
    guard.update(Record())
    os.kill(guard.pid, signal.SIGKILL)
    with pytest.raises(BrokenInstall, match="ended with -9"):
        guard.update(Record())
    with pytest.raises(BrokenInstall, match="ended with -9"):
        guard.hold([0])


def test_a_guard_that_cannot_start_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(BrokenInstall, match="cannot be started with /nowhere/python"):
        Guard()
    monkeypatch.undo()
    monkeypatch.setattr(own_python, "_BOOTSTRAP", "raise RuntimeError('broken in two')")
    with Guard() as broken, pytest.raises(BrokenInstall, match="ended with 1: RuntimeError: broken in two"):
        broken.wait_ready()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_do_not_end_it(guard: Guard, number: signal.Signals) -> None:
    os.kill(guard.pid, number)
    guard.update(Record())


def test_it_is_detached_and_holds_only_what_it_was_given(guard: Guard) -> None:
    assert os.getsid(guard.pid) == guard.pid
    assert not processes.has_terminal(guard.pid)
    read_end, write_end = os.pipe()
    try:
        before = [file.target for file in processes.open_files(guard.pid)]
        assert sum(target.startswith("socket:") for target in before) == 1
        assert guard.hold([write_end] * 600) == tuple(range(600))
        os.close(write_end)
        after = [file.target for file in processes.open_files(guard.pid) if file.target != os.devnull]  # its reserve
        assert len(after) == len([target for target in before if target != os.devnull]) + 600
        guard.dismiss()
        assert os.read(read_end, 1) == b""  # the last copy is closed
    finally:
        os.close(read_end)


def test_a_waiting_guard_imports_little() -> None:
    """Imports cost time at the start of every operation."""
    show = "import sys; import gpucr.undo.guard_process; print(*sys.modules)"
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path[:0] = [{str(Path(guards.__file__).parents[2])!r}]; {show}",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = done.stdout.split()
    ours = {name for name in loaded if name.startswith("gpucr")}
    own = {"gpucr.undo", "gpucr.undo.guard_process", "gpucr.linux", "gpucr.linux.oom"}
    assert ours == {"gpucr", "gpucr.version", *own}
    assert not {"json", "ctypes", "dataclasses", "subprocess", "threading"} & set(loaded)


def test_a_fork_of_the_operation_does_not_block_the_guard(
    counter: CounterFactory, driver: CudaDriver, operation: Operation, log: Path
) -> None:
    """A child that holds the operation's end of the socket, as multiprocessing makes them."""
    job = counter()
    fork = """
    gang.lock()
    if os.fork() == 0:
        for fd in range(256):
            if fd != protection._guard._socket.fileno():
                with contextlib.suppress(OSError):
                    os.close(fd)
        signal.pause()
    die()
    """
    operation(job.pid, _ON_JOB, fork)
    assert_as_found(job, driver, log)
    for pid in processes_of_this_test():
        with contextlib.suppress(OSError):  # it ends by itself
            if b"signal.pause()" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def test_an_interrupted_update_does_not_confuse_the_next(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    real_send = socket.send_fds

    def interrupted_send(*arguments: Any) -> int:
        real_send(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(socket, "send_fds", interrupted_send)
    with pytest.raises(KeyboardInterrupt):
        guard.update(Record())
    with pytest.raises(KeyboardInterrupt):
        guard.hold([0, 1])
    monkeypatch.undo()
    assert guard.hold([0]) == (0,)
    guard.update(Record())


def test_without_room_for_a_log_it_reports_to_syslog(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("syslog.syslog", lambda level, text: said.append(text))
    append_to_log("guard", "all is well")
    assert log.read_text().endswith(" all is well\n")
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert said == []
    log.unlink()
    log.mkdir()
    append_to_log("guard", "all is well")
    assert said == ["gpucr guard: all is well"]


# --- the record ------------------------------------------------------------------------------------------------

_BRING_BACK = BringBack(
    members=(GangMember(ProcessId(7, 9), CHECKPOINTED), GangMember(ProcessId(8, 9), RUNNING)),
    restore_threads={7: 70},
    detached=(DetachedStaging(7, (StagedExtent(4096, 8192, 0),)),),
    copies=(8,),
    stopped=(ProcessId(7, 9),),
)
_ACTIONS: tuple[Action, ...] = (
    _BRING_BACK,
    DiscardFolder("/snapshots/a", (1, 2), 0o755),
    RemoveWorkingFolder("/tmp/gpucr-work-0"),
    EndDump(ProcessId(13, 14), "manifest.json"),
    EndRestore((ProcessId(13, 14),), (15, 16)),
    EndRestored((ProcessId(11, 12),)),
    EndSandbox(ProcessId(17, 18)),
    EndJob((ProcessId(19, 20), ProcessId(21, 22))),
    CloseToTracers((ProcessId(23, 24),)),
    CallAfterRestore((ProcessId(25, 26),)),
    ForgetWork(processes=(ProcessId(29, 30),)),
    RemoveGhosts(("/a.cr.1.ghost",)),
    RemoveImages(("/snapshots/a", "/tmp"), "0"),
    RemoveLinkRemaps((ProcessId(27, 28),), (("/dev/shm", (1, 2)),)),
    RemoveSharedFiles("/dev/shm", "0", (MadeFile("a/b", 1, 2),), ("a",)),
    RemoveSocketFolders(("/run/a",)),
    PutBackCuts((CutOff("/log", 1, 2, "/log.gpucr-0"),)),
    RemoveFilters("gpucr-1-0a1b2c3d", (FilterPlace("nftables", 1), FilterPlace("iptables", 2))),
    EndStop((ProcessId(27, 28),)),
    EndRepair((ProcessId(27, 28),), (29, 30)),
    ForgetKept("gpucr-kept-0a1b2c3d", ("nftables",), (ProcessId(27, 28),)),
    LowerTcpMemory((1, 2, 3), (4, 5, 6)),
)
_FULL = Record((ProcessId(7, 9),), tuple(entry(action, [number]) for number, action in enumerate(_ACTIONS)))


@pytest.mark.parametrize("record", [Record(), _FULL])
def test_records_round_trip_over_the_wire(record: Record) -> None:
    assert decode(encode(record)) == record


def test_every_rooms_actions_round_trip_over_the_wire() -> None:
    assert load(decode(encode(_FULL)).entries) == list(_ACTIONS)
    for path in SOURCES.glob("*/recovery.py"):
        importlib.import_module(f"gpucr.{path.parent.name}.recovery")
    ours = {each for each in Action.__subclasses__() if each.__module__.startswith("gpucr.")}
    assert ours == {type(action) for action in _ACTIONS}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"pid":7', b'"pid":"7"'),
        (b'"pid":7', b'"pid":true'),
        (b'"start_time_ticks":9', b'"start_time_ticks":null'),
        (b'"7":70', b'"x":70'),
        (b'"7":70', b'"8":70'),
        (b'"mode_before":493', b'"mode_before":"rwx"'),
        (b'"roots":[', b'"roots":[1,'),
        (b'"kind":"gpucr.', b'"kind":"other.'),
        (b'"kind":"gpucr.gpu_state.recovery', b'"kind":"gpucr.undo.recovery'),
        (b":BringBack", b":Gang"),
        (b":BringBack", b":nothing"),
        (b"{", b"["),
    ],
)
def test_a_damaged_record_is_refused(old: bytes, new: bytes) -> None:
    good = encode(_FULL)
    assert old in good
    with pytest.raises(ValueError, match=r".+"):
        load(decode(good.replace(old, new, 1)).entries)


def test_an_impossible_record_is_refused(guard: Guard) -> None:
    with pytest.raises(ValueError, match="without a restore thread"):
        BringBack(detached=_BRING_BACK.detached)
    with pytest.raises(ValueError, match="does not hold"):
        guard.update(_FULL)


class Elsewhere(Action):
    """An action that a guard could not import."""


def test_an_action_the_guard_cannot_find_is_refused() -> None:
    with pytest.raises(ValueError, match="is not in the module `recovery` of a room"):
        entry(Elsewhere(), [])


def test_the_wrong_process_is_never_touched(operation: Operation, log: Path) -> None:
    """Each pid now belongs to another process."""
    with sleeper() as child, python("import signal; print('ready', flush=True); signal.pause()") as other:
        os.kill(child.pid, signal.SIGSTOP)
        wrong = "ProcessId(pid, 1)"
        operation(
            child.pid,
            f"protect(); protection.protect(BringBack((GangMember({wrong}, CudaState.RUNNING),), stopped=({wrong},))); "
            f"protection.protect(EndRestored((ProcessId({other.pid}, 1),))); "
            f"protection.protect(EndDump(ProcessId({other.pid}, 1), 'x'))\ndie()",
        )
        assert _status(child.pid) == "T"
        assert processes.is_alive(other.id)
    assert "as it was found" in log.read_text()
