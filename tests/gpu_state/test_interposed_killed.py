"""gpucr is killed before and after each action on an interposed job, which keeps running or is fully suspended."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.interposer.library import installed, preload_path
from gpucr.model import CudaState
from tests.command import python, run
from tests.counter import Counter, CounterFactory, wait_until
from tests.scenarios.test_killed import is_claimed, is_unharmed
from tests.storm import sample

pytestmark = pytest.mark.in_turn

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED

KILLER = """
import os, signal, sys, gpucr
from gpucr.criu.engine import Criu
from gpucr.driver.cuda import CudaDriver
from gpucr.interposer.client import Agent
from gpucr.gpu_state.interposed import suspended
from gpucr.interposer.vault import Vault
when, owner, name, operation, *words = sys.argv[1:]
owner = {"driver": CudaDriver, "agent": Agent, "vault": Vault, "criu": Criu}[owner]
if name in ("create", "give_back"):  # one where the GPU has no room for what is filled early, the other where it has
    suspended.VAULT_BYTES = 1 << 60 if name == "create" else 0
real = getattr(owner, name)
def killed(*arguments, **options):
    result = real(*arguments, **options) if when == "after" else None
    if when == "after" and name == "export":
        result = list(result)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, name, killed)
getattr(gpucr, operation)(*(int(word) if word.isdigit() else word for word in words))
"""


@pytest.fixture
def job(counter: CounterFactory, sim_only: None, tmp_path: Path) -> Counter:
    """Two processes whose device memory can leave them."""
    variables = {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(tmp_path / "agents")}
    return counter("--mib", "24", "--fork", "1", env=variables)


def killed(when: str, call: str, operation: str, *words: object, first: str = "") -> None:
    done = python(first + KILLER, when, *call.split("."), operation, *words)
    assert done.returncode == -signal.SIGKILL, done.stderr


def wait_for_guard(pids: list[int]) -> None:
    wait_until(lambda: not is_claimed(pids), "the guard to be done")


def assert_runs(job: Counter, driver: CudaDriver, pids: list[int], expected: int) -> None:
    assert job.processes() == pids
    assert {driver.state(pid) for pid in pids} == {RUNNING}
    assert job.ask() == expected
    assert job.send("verify") == "ok"
    assert is_unharmed(job)


def around(*calls: str) -> list[tuple[str, str]]:
    """Each of these calls, before and after it; a sample of them where no storm is asked for."""
    return sample(list(itertools.product(calls, ("before", "after"))), 21)


@pytest.mark.parametrize(("call", "when"), around(
    "agent.close_gate", "driver.lock", "driver.unlock", "agent.export", "agent.drop", "vault.read",
    "driver.checkpoint", "agent.keep",
))  # fmt: skip
def test_in_a_suspend(when: str, call: str, job: Counter, driver: CudaDriver) -> None:
    pids = job.processes()
    killed(when, call, "suspend", job.pid)
    wait_for_guard(pids)
    assert_runs(job, driver, pids, 101)
    gpucr.suspend(job.pid, gpu_state="interposed")
    gpucr.resume(job.pid)
    assert_runs(job, driver, pids, 102)


@pytest.mark.parametrize(("call", "when"), around(
    "driver.restore", "driver.unlock", "agent.create", "agent.give_back", "vault.write", "driver.lock", "agent.keep",
))  # fmt: skip
def test_in_a_resume(when: str, call: str, job: Counter, driver: CudaDriver) -> None:
    pids = job.processes()
    gpucr.suspend(job.pid, gpu_state="interposed")
    killed(when, call, "resume", job.pid)
    wait_for_guard(pids)
    gpucr.resume(job.pid)
    assert_runs(job, driver, pids, 101)


@pytest.mark.criu
@pytest.mark.parametrize(("call", "when"), around(
    "agent.close_gate", "agent.export", "agent.drop", "vault.read_into", "driver.checkpoint", "criu.dump",
))  # fmt: skip
def test_in_a_dump(when: str, call: str, job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    """Before the commit the job keeps running; after it there is a snapshot of the whole job."""
    pids = job.processes()
    killed(when, call, "dump", job.pid, tmp_path / "s")
    wait_for_guard(pids)
    if call != "criu.dump" or when == "before":
        assert_runs(job, driver, pids, 101)
        gpucr.dump(job.pid, tmp_path / "t")
    to = tmp_path / "t" if (tmp_path / "t").exists() else tmp_path / "s"
    job.reap()
    gpucr.restore(to)
    assert job.processes() == pids
    assert job.send("verify") == "ok"


WITH_ITS_GUARD = """
import os, signal
from gpucr.undo.guard import Guard
_real_init, _guards = Guard.__init__, []
def _init(guard):
    _real_init(guard)
    _guards.append(guard)
Guard.__init__ = _init
_kill = os.kill
def kill(pid, number):
    for guard in _guards:
        _kill(guard.pid, signal.SIGKILL)
    _kill(pid, number)
os.kill = kill
"""


def test_killed_with_its_guard_the_job_is_locked_and_resumed(job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    """What comes next says so, and does not take the lock for the job's own."""
    pids = job.processes()
    killed("after", "driver.lock", "dump", job.pid, tmp_path / "s", first=WITH_ITS_GUARD)
    assert CudaState.LOCKED in {driver.state(pid) for pid in pids}
    done = run("dump", job.pid, "--to", tmp_path / "t", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"`gpucr resume {job.pid}` lets it run now" in done.stderr
    gpucr.resume(job.pid)
    assert_runs(job, driver, pids, 101)


def test_killed_with_its_guard_while_memory_was_away(job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    """A snapshot would lack it: nothing but a resume is allowed, which says that nobody has it."""
    killed("after", "agent.drop", "dump", job.pid, tmp_path / "s", first=WITH_ITS_GUARD)
    for command in (("dump", job.pid, "--to", tmp_path / "t"), ("suspend", job.pid)):
        done = run(*command)
        assert done.returncode == 3, done.stderr
        assert "of its device memory are away" in done.stderr
    with pytest.raises(gpucr.InterposerError, match="nobody has it"):
        gpucr.resume(job.pid)


def is_restored(snapshot: Path) -> bool:
    """Whether a restore succeeds; not while processes of another one have the pids."""
    try:
        gpucr.restore(snapshot)
    except gpucr.Unsupported as e:
        if e.code != "GPUCR-PID-IN-USE":
            raise
        return False
    return True


@pytest.mark.criu
@pytest.mark.parametrize(("call", "when"), around(
    "vault.make", "vault.write_from", "driver.restore", "agent.give_back", "driver.unlock",
))  # fmt: skip
def test_in_a_restore(when: str, call: str, job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    """Nothing of it is left, and the next one succeeds."""
    pids = job.processes()
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    killed(when, call, "restore", tmp_path / "s")
    wait_for_guard(pids)
    wait_until(lambda: is_restored(tmp_path / "s"), "the processes of the killed restore to end")
    assert_runs(job, driver, pids, 101)
