"""Only one gpucr at a time works on a process, regardless of mounts and namespaces."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import gpucr
from gpucr.errors import Busy, Unsupported
from gpucr.linux import claims, processes
from gpucr.linux.claims import claimed, claimed_pids
from tests.children import sleeper, unused_pid
from tests.counter import wait_until

HOLDER = """
import os, subprocess, sys
from gpucr.linux import claims
way, pid = sys.argv[1:]
if way == "fallback":
    claims.pidfds_are_processes = lambda: False
pid = int(pid) or subprocess.Popen(["sleep", "1000"]).pid
try:
    with claims.claimed([pid]):
        print("claimed", os.stat("/proc").st_dev, flush=True)
        sys.stdin.readline()
    print("let go", flush=True)
    sys.stdin.readline()
except claims.Busy as e:
    print("refused:", e, flush=True)
"""


@pytest.fixture(params=["pidfd", "fallback"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How this process claims, and what a holder is told to do as well."""
    if request.param == "fallback":
        monkeypatch.setattr(claims, "pidfds_are_processes", lambda: False)
    elif not claims.pidfds_are_processes():
        pytest.skip("a kernel before 6.9 has the fallback only")
    return str(request.param)


@contextlib.contextmanager
def holder(way: str, pid: int, *unshare: str) -> Iterator[subprocess.Popen[str]]:
    """A process that claims ``pid`` (0: a child of its own) in namespaces, and with a mount of /proc, of its own.

    Everything in its pid namespace ends with it.
    """
    inside = [sys.executable, "-c", HOLDER, way, str(pid)]
    command = ["unshare", *unshare, "--kill-child", "--mount-proc", *inside] if unshare else inside
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _let_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _is_free(pid: int) -> bool:
    with contextlib.suppress(Unsupported), claimed([pid]):
        return True
    return False


@pytest.mark.root
def test_two_mounts_of_proc(way: str) -> None:
    with sleeper() as job, holder(way, job.pid, "--mount", "--fork") as other:
        said = _says(other).split()
        assert said[0] == "claimed"
        assert int(said[1]) != os.stat("/proc").st_dev  # else this shows nothing
        with pytest.raises(Unsupported, match=rf"at work on process {job.pid}: process \d+ \(python.*\) of uid 0"):
            claimed([job.pid]).__enter__()
        _let_go(other)
        assert _says(other) == "let go\n"
        with claimed([job.pid]), holder(way, job.pid, "--mount", "--fork") as late:
            assert f": process {os.getpid()} (" in _says(late)


@pytest.mark.root
@pytest.mark.parametrize("namespaces", [["--pid"], ["--pid", "--user", "--map-root-user"]], ids=["pid", "user"])
def test_another_pid_namespace(way: str, namespaces: list[str]) -> None:
    """A privileged container, and the host, which knows the job by another pid."""
    with holder(way, 0, "--mount", "--fork", *namespaces) as container:
        assert _says(container).startswith("claimed")
        (job,) = (each for each in processes.tree(container.pid) if each.name == "sleep")
        with pytest.raises(Busy) as caught:
            claimed([job.pid]).__enter__()
        assert caught.value.code == "GPUCR-BUSY"
        assert "python" in str(caught.value)
        with pytest.raises(Unsupported, match="at work"):  # the commands ask the same
            gpucr.suspend(job.pid)
        _let_go(container)
        assert _says(container) == "let go\n"
        assert _is_free(job.pid)


def test_a_claim_lasts_exactly_as_long_as_its_holder(way: str) -> None:
    """The guard has copies of the descriptors: a child that inherits them stands for it."""
    with sleeper() as job, holder(way, job.pid) as other:
        assert _says(other).startswith("claimed")
        assert not _is_free(job.pid)
        other.kill()
        wait_until(lambda: _is_free(job.pid), "the claim to end")
    with sleeper() as job:
        with claimed([job.pid]) as fds:
            guard = subprocess.Popen(["sleep", "1000"], pass_fds=fds)
        try:
            assert not _is_free(job.pid)
        finally:
            guard.kill()
            guard.wait()
        assert _is_free(job.pid)


def test_claims_on_two_jobs_are_independent(way: str) -> None:
    with sleeper() as one, sleeper() as other, claimed([one.pid, unused_pid()]):
        with claimed([other.pid]):
            assert not _is_free(one.pid)
        with pytest.raises(Unsupported), claimed([other.pid, one.pid]):
            pass
        assert _is_free(other.pid)  # the refused one has left nothing


def test_only_one_restore_can_claim_a_pid() -> None:
    first, second = unused_pid(), 1
    with claimed_pids([first]):
        with claimed_pids([second]):  # another job
            pass
        with pytest.raises(Unsupported, match=f"restoring a job with process {first}"), claimed_pids([second, first]):
            pass
        with claimed_pids([second]):  # the refused one has left nothing
            pass
    with claimed_pids([first, second]):
        pass


def test_a_restore_claims_the_processes_that_it_has_restored(way: str) -> None:
    with sleeper() as job, claimed_pids([job.pid]):
        with claimed([job.pid]):
            assert not _is_free(job.pid)
        assert _is_free(job.pid)


@pytest.mark.root
def test_a_restore_is_visible_through_another_mount_of_proc() -> None:
    code = "import sys; from gpucr.linux.claims import *\nwith claimed_pids([int(sys.argv[1])]): pass"
    pid = unused_pid()
    with claimed_pids([pid]):
        command = ["unshare", "--mount", "--mount-proc", sys.executable, "-c", code, str(pid)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "another gpucr is restoring" in ended.stderr
