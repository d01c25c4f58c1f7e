"""A job suspended through its interposers is dumped in that state, and is suspended after a restore."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

import gpucr
from gpucr.criu.engine import Criu
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import CriuError, Unsupported
from gpucr.gpu_state import suspended
from gpucr.interposer.client import Agent, ask_status
from gpucr.interposer.library import installed, preload_path
from gpucr.interposer.protocol import Status
from gpucr.linux import processes
from gpucr.model import CudaState
from tests.counter import Counter, CounterFactory
from tests.gpu_state.test_interposed_killed import killed, wait_for_guard
from tests.storm import later

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED

pytestmark = pytest.mark.criu


@pytest.fixture
def job(counter: CounterFactory, sim_only: None, tmp_path: Path) -> Counter:
    """Two processes, suspended; the device memory of both has left them."""
    variables = {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(tmp_path / "agents")}
    job = counter("--mib", "24", "--fork", "1", env=variables)
    gpucr.suspend(job.pid, gpu_state="interposed")
    return job


def assert_comes_back(job: Counter, driver: CudaDriver, expected: int) -> None:
    """Assert that it is suspended, and can be resumed with all its memory."""
    assert {driver.state(pid) for pid in job.processes()} == {CHECKPOINTED}
    gpucr.resume(job.pid)
    assert {driver.state(pid) for pid in job.processes()} == {RUNNING}
    assert job.ask() == expected
    assert job.send("verify") == "ok"


@pytest.mark.parametrize("to", ["folder", "store"])
def test_it_is_dumped_and_restored_suspended(to: str, job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    where = str(tmp_path / "s")
    if to == "store":
        where = f"{gpucr.init_store(tmp_path / 's').backend.url}#a"
    report = gpucr.dump(job.pid, where)
    assert report.size_bytes > 2 * 24 << 20
    job.kill()  # reaps
    gpucr.restore(where)
    assert_comes_back(job, driver, 101)
    gpucr.suspend(job.pid, gpu_state="interposed")  # nothing of it is left over in the way of a second time
    assert_comes_back(job, driver, 102)


@pytest.mark.parametrize("twice", [False, True])
def test_the_record_of_its_suspend_comes_back(twice: bool, job: Counter, tmp_path: Path) -> None:
    """Also when it was suspended while another tool had suspended it: then a resume leaves it so."""

    def noted() -> list[suspended.SuspendedRecord | None]:
        return [suspended.recall(processes.describe(pid).id) for pid in job.processes()]

    if twice:
        for pid in job.processes():
            suspended.forget(processes.describe(pid).id)
        gpucr.suspend(job.pid)
    before = noted()
    assert {each.found for each in before if each is not None} == {CHECKPOINTED if twice else RUNNING}
    assert all(each is not None and (twice or sum(each.device_bytes.values()) > 24 << 20) for each in before)
    gpucr.dump(job.pid, tmp_path / "s")
    job.kill()  # reaps
    gpucr.restore(tmp_path / "s")
    assert noted() == before


def test_left_running_it_keeps_what_it_had(job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    assert_comes_back(job, driver, 101)
    job.kill()
    gpucr.restore(tmp_path / "s")
    assert_comes_back(job, driver, 101)


def test_frozen_it_is_saved(job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    with gpucr.freeze(job.pid) as frozen:
        frozen.save(tmp_path / "s")
    assert_comes_back(job, driver, 101)
    job.kill()
    gpucr.restore(tmp_path / "s")
    assert_comes_back(job, driver, 101)


def test_it_is_resumed_on_another_gpu(job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    gpucr.dump(job.pid, tmp_path / "s")
    job.kill()  # reaps
    gpucr.restore(tmp_path / "s")
    gpucr.resume(job.pid, gpu_map="0=1,1=0")
    assert job.ask() == 101
    assert job.send("verify") == "ok"


def test_a_failed_dump_leaves_it_suspended(
    job: Counter, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_arguments: object, **_options: object) -> None:
        raise CriuError("it does not work today", phase="dump")

    with monkeypatch.context() as context:
        context.setattr(Criu, "dump", fails)
        with pytest.raises(CriuError, match="does not work today"):
            gpucr.dump(job.pid, tmp_path / "s")
    assert_comes_back(job, driver, 101)


@pytest.mark.parametrize(
    ("when", "call"),
    [later("before", "agent.keep"), ("after", "criu.dump"), later("after", "agent.keep"), later("before", "criu.dump")],
)
def test_gpucr_is_killed(when: str, call: str, job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    """While the files are in gpucr's hands alone the guard has them."""
    pids = job.processes()
    killed(when, call, "dump", job.pid, tmp_path / "s")
    wait_for_guard(pids)
    if job.processes() != pids:  # it was killed after it had ended the job
        assert (when, call) == ("after", "criu.dump")
        job.kill()  # reaps
        gpucr.restore(tmp_path / "s")
    assert_comes_back(job, driver, 101)


def test_a_process_that_does_not_keep_everything_is_reported(job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    with Agent(job.pid) as agent:
        kept = agent.fetch()
        assert kept is not None
        agent.keep(None)
    with pytest.raises(gpucr.InterposerError, match=f"process {job.pid} does not keep all"):
        gpucr.dump(job.pid, tmp_path / "s")
    with Agent(job.pid) as agent:
        agent.keep(kept)
    assert_comes_back(job, driver, 101)


def test_memory_of_other_processes_is_refused(
    job: Counter, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[[Agent], Status] = Agent.status
    monkeypatch.setattr(Agent, "status", lambda agent: replace(real(agent), imported=3))
    with pytest.raises(Unsupported, match=f"{job.pid} is suspended, and has 3 blocks of device memory of other") as e:
        gpucr.dump(job.pid, tmp_path / "s")
    assert e.value.code == "GPUCR-GPU-STATE"
    monkeypatch.undo()
    assert ask_status(job.pid) is not None
    assert_comes_back(job, driver, 101)
