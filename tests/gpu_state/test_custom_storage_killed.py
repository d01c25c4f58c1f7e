"""gpucr is killed before and after each request to its carrier: the job keeps running, or is fully suspended."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import GpucrError, JobDamaged
from gpucr.gpu_state.custom_storage.client import Carrier
from gpucr.gpu_state.custom_storage.messages import Answer, Ask
from gpucr.linux import memory
from gpucr.model import CudaState
from tests.command import python
from tests.counter import Counter, CounterFactory, wait_until
from tests.scenarios.test_killed import is_claimed
from tests.storm import later, sample

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED

KILLER = """
import os, signal, sys, threading, gpucr
from gpucr.criu.engine import Criu
from gpucr.driver.cuda import CudaDriver
from gpucr.gpu_state.custom_storage import kept
from gpucr.gpu_state.custom_storage.client import Carrier
from gpucr.gpu_state.custom_storage.spool import Spool
from gpucr.linux import memory
when, name, number, operation, *words = sys.argv[1:]
left, turn = int(number), threading.Lock()
def killing(owner, method, matches=lambda *arguments: True):
    real = getattr(owner, method)
    def killed(*arguments, **options):
        global left
        if not matches(*arguments):
            return real(*arguments, **options)
        with turn:
            left -= 1
            is_it = not left
        result = real(*arguments, **options) if when == "after" or not is_it else None
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, method, killed)
if name == "criu":
    killing(Criu, "dump")
elif name in ("keep", "let_go"):
    killing(kept, name)
elif name in ("unlock", "lock"):
    killing(CudaDriver, name)
elif name != "frozen":
    killing(Carrier, "ask", lambda carrier, ask, *rest: ask.what == name)
if os.environ.get("TEST_HOST_MEMORY") == "none":
    memory.available_bytes = lambda pid=None: 0
    file = Spool.file
    def told(spool, size_bytes):
        made = file(spool, size_bytes)
        print("on disk:", spool.folder, os.fstat(made.fd).st_nlink, oct(os.fstat(made.fd).st_mode & 0o777),
              file=sys.stderr, flush=True)
        return made
    Spool.file = told
options = {"leave_running": True, "persist": "sync"} if operation == "dump" else {}
frozen = getattr(gpucr, operation)(*(int(word) if word.isdigit() else word for word in words), **options)
if name == "frozen":
    os.kill(os.getpid(), signal.SIGKILL)
"""

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("sim_only"), pytest.mark.in_turn]


@pytest.fixture(autouse=True)
def driver_615(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCR_SIM_DRIVER", "615")


@pytest.fixture
def job(counter: CounterFactory) -> Counter:
    """Two processes."""
    return counter("--mib", "8", "--fork", "1")


def killed(when: str, call: str, number: int, operation: str, *words: object, env: dict[str, str] | None = None) -> str:
    done = python(KILLER, when, call, number, operation, *words, env=env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stderr


def wait_for_guard(pids: list[int]) -> None:
    wait_until(lambda: not is_claimed(pids), "the guard to be done")


def assert_runs(job: Counter, driver: CudaDriver, pids: list[int], expected: int) -> None:
    assert job.processes() == pids
    assert {driver.state(pid) for pid in pids} == {RUNNING}
    assert job.ask() == expected
    assert job.send("verify") == "ok"
    for pid in pids:
        assert "gpucr-custom" not in Path(f"/proc/{pid}/maps").read_text()


def moments(*calls: tuple[str, int]) -> list[tuple[str, str, int]]:
    """Before and after each of these calls, the first or a later one; outside a storm a sample of them."""
    return sample([(when, *call) for call in calls for when in ("before", "after")], 21)


@pytest.mark.parametrize(
    ("when", "call", "number"),
    moments(
        ("checkpoint", 1), ("checkpoint", 2), ("copy", 1), ("complete", 1), ("complete", 2), ("keep", 1), ("saved", 2)
    ),
)
def test_in_a_suspend(when: str, call: str, number: int, job: Counter, driver: CudaDriver) -> None:
    pids = job.processes()
    killed(when, call, number, "suspend", job.pid)
    wait_for_guard(pids)
    assert_runs(job, driver, pids, 101)
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid)
    assert_runs(job, driver, pids, 102)


@pytest.mark.criu
@pytest.mark.parametrize(
    ("when", "call", "number"),
    moments(("place", 1), ("checkpoint", 2), ("saved", 1), ("complete", 2), ("criu", 1), ("restore", 2), ("forget", 1)),
)
def test_in_a_dump(when: str, call: str, number: int, job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    """The only copy is in the files of a snapshot, which may be complete by the time the job comes back."""
    pids = job.processes()
    killed(when, call, number, "dump", job.pid, tmp_path / "s")
    wait_for_guard(pids)
    assert_runs(job, driver, pids, 101)
    assert (tmp_path / "s").exists() == (call in ("restore", "forget"))


@pytest.fixture
def short_of_memory(tmp_path: Path) -> dict[str, str]:
    """The environment of a gpucr that has no host memory for a copy of device memory, but a disk."""
    if memory.lies_in_memory(tmp_path):
        pytest.skip("files on a disk are tried: give pytest a --basetemp there")
    return {"TEST_HOST_MEMORY": "none", "TMPDIR": str(tmp_path)}


@pytest.mark.criu
@pytest.mark.parametrize(
    ("when", "call", "number"),
    moments(
        ("checkpoint", 2), ("copy", 1), ("copy", 2), ("complete", 1), ("saved", 2), ("criu", 1), ("restore", 2),
        ("complete", 4),
    ),
)  # fmt: skip
def test_in_a_dump_through_a_disk(
    when: str,
    call: str,
    number: int,
    job: Counter,
    driver: CudaDriver,
    tmp_path: Path,
    short_of_memory: dict[str, str],
) -> None:
    """The only copy is in files without names, which the carrier has open, too."""
    pids, store = job.processes(), tmp_path / "store"
    gpucr.init_store(store)
    said = killed(when, call, number, "dump", job.pid, f"{store}#s", env=short_of_memory)
    assert said.count(f"on disk: {tmp_path} 0 0o600") == len(pids), said
    wait_for_guard(pids)
    assert_runs(job, driver, pids, 101)
    assert [each.name for each in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize(
    ("when", "call", "number"), [later("after", "copy", 2), ("after", "complete", 2), later("after", "frozen", 1)]
)
def test_in_a_freeze_through_a_disk(
    when: str,
    call: str,
    number: int,
    job: Counter,
    driver: CudaDriver,
    tmp_path: Path,
    short_of_memory: dict[str, str],
) -> None:
    pids = job.processes()
    assert "on disk" in killed(when, call, number, "freeze", job.pid, env=short_of_memory)
    wait_for_guard(pids)
    assert_runs(job, driver, pids, 101)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("when", "call", "number"),
    moments(("place", 1), ("restore", 1), ("restore", 2), ("complete", 1), ("let_go", 2), ("unlock", 2)),
)
def test_in_a_resume(when: str, call: str, number: int, job: Counter, driver: CudaDriver) -> None:
    pids = job.processes()
    gpucr.suspend(job.pid)
    killed(when, call, number, "resume", job.pid)
    wait_for_guard(pids)
    assert {driver.state(pid) for pid in pids} == {CHECKPOINTED}
    gpucr.resume(job.pid)
    assert_runs(job, driver, pids, 101)


@pytest.mark.parametrize("what", ["checkpoint", "complete"])
def test_a_process_whose_memory_died_with_the_carrier_is_ended(
    what: str, counter: CounterFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot run: nobody else can end what the driver has begun, or has the bytes. The guard says so and ends it."""
    job = counter("--mib", "8")
    real = Carrier.ask

    def killing(carrier: Carrier, ask: Ask, descriptors: Sequence[int] = ()) -> Answer:
        answer = real(carrier, ask, descriptors)
        if ask.what == what:
            os.kill(carrier.id.pid, signal.SIGKILL)
        return answer

    monkeypatch.setattr(Carrier, "ask", killing)
    with pytest.raises(GpucrError) as raised:
        gpucr.suspend(job.pid)
    assert isinstance(raised.value, JobDamaged), raised.value
    wait_until(lambda: job.pid not in job.processes(), "its end")
