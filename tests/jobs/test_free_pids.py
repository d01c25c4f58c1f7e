"""The pids that a restore needs, and what may still hold them after the job's processes have ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

import gpucr
from gpucr.criu.image_entries import images_in
from gpucr.criu.pids import pids_in
from gpucr.linux import processes
from gpucr.snapshot import machine
from tests.counter import wait_until

pytestmark = pytest.mark.criu

_PR_SET_CHILD_SUBREAPER = 36  # include/uapi/linux/prctl.h

FOR_EVER = """
os.closerange(0, 64)
while True:
    time.sleep(0.05)
"""
WITH_ZOMBIE = (
    """
import os, time
child = os.fork()
if child == 0:
    os._exit(7)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
print(os.getpid(), child, flush=True)
"""
    + FOR_EVER
)
WITH_DAEMON = (
    """
import os, sys, time
if sys.argv[1] == "process group":
    if os.fork():
        os.wait()
        time.sleep(600)
    os.setpgid(0, 0)
reading, writing = os.pipe()
if os.fork() == 0:
    daemon = os.fork()
    if daemon:
        os.write(writing, b"%d" % daemon)
        os._exit(0)
else:
    os.wait()
    print(os.getpid(), os.read(reading, 64).decode(), flush=True)
"""
    + FOR_EVER
)

WITH_LOST_LEADER = (
    """
import ctypes, os, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
leader = os.fork()
if leader == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
else:
    os.waitpid(leader, 0)
    print(os.getpid(), leader, flush=True)
"""
    + FOR_EVER
)

Start = Callable[..., tuple[int, int]]


@pytest.fixture(autouse=True)
def subreaper() -> Iterator[None]:
    """Remains of a killed job become this process's children, as in a container whose pid 1 reaps now and then."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = set(psutil.Process().children())
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    assert libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
    for keeper in set(psutil.Process().children()) - before:
        wait_until(partial(collected, keeper.pid), "the keeper of a restored job to be collected")


@pytest.fixture
def start() -> Iterator[Start]:
    """Start programs that tell the pids of the job and of another process of theirs; returns these.

    Each begins a session: the tests' own may have begun outside the pid namespace, and CRIU could not dump it.
    """
    with contextlib.ExitStack() as cleanup:

        def start_program(code: str, *arguments: str) -> tuple[int, int]:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code, *arguments],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            cleanup.callback(child.wait)
            assert child.stdout is not None
            with child.stdout as output:
                job, other = map(int, output.readline().split())
            cleanup.callback(end, child.pid, job, other)
            return job, other

        yield start_program


def end(*pids: int) -> None:
    """Kill these processes, and anything restored from them, and collect those that are this process's children."""
    for pid in pids:
        with contextlib.suppress(gpucr.ProcessNotFound):
            processes.kill_and_wait([each.id for each in processes.tree(pid)])
        wait_until(partial(collected, pid), f"process {pid} to be collected")


def collected(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return processes.read_stat(pid) is None


def dump_and_collect(job: int, snapshot: Path, *, force: bool = False) -> None:
    gpucr.dump(job, snapshot, force=force)
    wait_until(partial(collected, job), "the job to be collected")


def state_and_parent(pid: int) -> tuple[str, int]:
    stat = processes.read_stat(pid)
    assert stat is not None
    return stat.status, stat.parent_pid


def test_a_zombie_of_the_job_is_waited_for(start: Start, tmp_path: Path) -> None:
    """It was one before the dump: the manifest, which reports what ran, does not have it."""
    job, zombie = start(WITH_ZOMBIE)
    dump_and_collect(job, tmp_path / "s")
    assert state_and_parent(zombie) == ("Z", os.getpid())
    collecting = threading.Timer(0.5, os.waitpid, (zombie, 0))
    collecting.start()
    gpucr.restore(tmp_path / "s")
    collecting.join()
    assert state_and_parent(zombie) == ("Z", job)


def test_a_zombie_of_the_job_that_is_never_reaped(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "REAPING_TIMEOUT_S", 0.05)
    job, zombie = start(WITH_ZOMBIE)
    dump_and_collect(job, tmp_path / "s")
    with pytest.raises(gpucr.Unsupported, match=f"pid {zombie} is taken by the zombie of python") as caught:
        gpucr.restore(tmp_path / "s")
    assert caught.value.code == "GPUCR-PID-IN-USE"
    assert caught.value.hint is not None
    assert f"let process {os.getpid()} collect" in caught.value.hint


@pytest.mark.parametrize("kind", ["session", "process group"])
def test_a_pid_outlives_its_process(kind: str, start: Start, tmp_path: Path) -> None:
    """As the session or the group of a daemon that has left the job's tree."""
    job, daemon = start(WITH_DAEMON, kind)
    dump_and_collect(job, tmp_path / "s")
    assert processes.read_stat(job) is None
    with pytest.raises(gpucr.Unsupported, match=rf"pid {job} is still the {kind} of process {daemon} \(python") as e:
        gpucr.restore(tmp_path / "s")
    assert e.value.code == "GPUCR-PID-IN-USE"
    assert e.value.hint is not None
    assert f"end process {daemon}" in e.value.hint
    assert ("--isolate" in e.value.hint) == (kind == "session")
    end(daemon)
    assert gpucr.restore(tmp_path / "s").pid == job


def test_a_session_of_the_job_whose_first_process_has_ended(start: Start, tmp_path: Path) -> None:
    """CRIU recreates that process and ends it, so its pid must be free; then another one adopts its child."""
    job, leader = start(WITH_LOST_LEADER)
    (_, member) = processes.tree(job)
    assert member.session_id == leader
    with pytest.raises(gpucr.Unsupported, match=f"process {member.pid} .* another session than its parent {job}") as e:
        gpucr.dump(job, tmp_path / "s")
    assert e.value.code == "GPUCR-ADOPTED"
    dump_and_collect(job, tmp_path / "s", force=True)
    os.waitpid(member.pid, 0)
    assert processes.read_stat(leader) is None
    assert leader in pids_in(images_in(tmp_path / "s" / "images"))
    gpucr.restore(tmp_path / "s")
    assert os.getsid(member.pid) == leader
    assert member.pid not in [each.pid for each in processes.tree(job)]
    end(member.pid)


# --- in a container that has just started -----------------------------------------------------------------------------

THREADS = """
import sys, threading, time
for _ in range(3):
    threading.Thread(target=time.sleep, args=(600,)).start()
open(sys.argv[1] + "-ready", "w").close()
"""
DUMPS = f"""
import os, subprocess, sys, time
import gpucr
job = subprocess.Popen([sys.executable, "-c", {THREADS!r}, sys.argv[1]], stdin=-3, stdout=-3, start_new_session=True)
while not os.path.exists(sys.argv[1] + "-ready"):
    time.sleep(0.01)
gpucr.dump(job.pid, sys.argv[1])
"""
RESTORES = """
import sys, os
import gpucr
try:
    print(gpucr.restore(sys.argv[1], isolate=sys.argv[2] == "isolate").processes)
except gpucr.GpucrError as e:
    print(e.code, e.hint)
"""
_FRESH = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def in_new_namespace(*command: str) -> str:
    """What it writes, as the first process of a pid namespace."""
    return subprocess.run([*_FRESH, *command], check=True, capture_output=True, text=True, timeout=120).stdout


def test_a_restore_keeps_off_the_pids_of_its_job(tmp_path: Path) -> None:
    python, snapshot = [sys.executable, "-c"], str(tmp_path / "s")
    in_new_namespace(*python, DUMPS, snapshot)
    assert in_new_namespace(*python, RESTORES, snapshot, "here") == "1\n"
    shell = [f"{sys.executable} -c '{RESTORES}' {snapshot} $0; true"]  # the job had pid 2
    for _ in range(2):
        assert in_new_namespace("sh", "-c", *shell, "isolate") == "1\n"
    refused = in_new_namespace("sh", "-c", *shell, "here")
    assert refused.startswith("GPUCR-PID-IN-USE restore with --isolate")
