"""gpucr cannot use a GPU itself: interposed memory there is left to the driver, before anything is stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.driver.gpus import list_gpus
from gpucr.interposer.library import installed, preload_path
from gpucr.interposer.vault import Vault, VaultFailed
from gpucr.model import CudaState
from gpucr.undo.events import Progress
from tests.counter import Counter, CounterFactory
from tests.storm import later

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED
WHY = "gpucr itself cannot use the GPU today"


@pytest.fixture
def job(counter: CounterFactory, sim_only: None, tmp_path: Path) -> Counter:
    """Two processes with interposers."""
    variables = {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(tmp_path / "agents")}
    return counter("--mib", "24", "--fork", "1", env=variables)


@pytest.fixture
def no_vault(job: Counter, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """From here on no vault starts."""

    def fails(*_arguments: object, **_options: object) -> None:
        raise VaultFailed(WHY, hint="")

    monkeypatch.setattr(Vault, "__init__", fails)
    return monkeypatch


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def listen(said: list[str]) -> Callable[[Progress], None]:
    return lambda progress: said.append(progress.description) if progress.event == "note" else None


def assert_told(said: list[str], job: Counter) -> None:
    for pid in job.processes():
        assert f"process {pid}: device memory leaves by the driver, not by an interposer: {WHY}" in said


def assert_right(job: Counter, driver: CudaDriver, expected: int) -> None:
    assert {driver.state(pid) for pid in job.processes()} == {RUNNING}
    assert job.ask() == expected
    assert job.send("verify") == "ok"


def test_it_is_suspended_and_resumed(
    job: Counter, driver: CudaDriver, no_vault: pytest.MonkeyPatch, said: list[str], listen: Callable[[Progress], None]
) -> None:
    gpucr.suspend(job.pid, on_progress=listen)
    assert {driver.state(pid) for pid in job.processes()} == {CHECKPOINTED}
    assert_told(said, job)
    gpucr.resume(job.pid)
    assert_right(job, driver, 101)
    no_vault.undo()
    gpucr.suspend(job.pid, gpu_state="interposed")
    gpucr.resume(job.pid)
    assert_right(job, driver, 102)


def test_it_is_moved(job: Counter, driver: CudaDriver, no_vault: pytest.MonkeyPatch) -> None:
    gpucr.move(job.pid, gpu_map="0=1,1=0")
    assert_right(job, driver, 101)


@pytest.mark.criu
@pytest.mark.parametrize("leave_running", [True, later(False)])
def test_it_is_dumped(
    leave_running: bool, job: Counter, driver: CudaDriver, no_vault: pytest.MonkeyPatch, said: list[str],
    listen: Callable[[Progress], None], tmp_path: Path,
) -> None:  # fmt: skip
    gpucr.dump(job.pid, tmp_path / "s", leave_running=leave_running, on_progress=listen)
    if leave_running:
        assert_told(said, job)
        assert_right(job, driver, 101)
    job.kill()
    gpucr.restore(tmp_path / "s")
    assert_right(job, driver, 101)


@pytest.mark.criu
def test_with_a_vault_on_one_of_two_gpus_the_other_uses_its_interposer(
    job: Counter, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch, said: list[str],
    listen: Callable[[Progress], None], tmp_path: Path,
) -> None:  # fmt: skip
    """The child computes on the second GPU."""
    real, first = Vault.__init__, list_gpus()[0].uuid

    def fails(self: Vault, uuid: str, *, pins_ring: bool) -> None:
        if uuid == first:
            raise VaultFailed(WHY, hint="")
        real(self, uuid, pins_ring=pins_ring)

    monkeypatch.setattr(Vault, "__init__", fails)
    report = gpucr.dump(job.pid, tmp_path / "s", leave_running=True, on_progress=listen)
    assert_right(job, driver, 101)
    assert any(WHY in each for each in said)
    assert report.left_running
    job.kill()
    monkeypatch.undo()
    gpucr.restore(tmp_path / "s")
    assert_right(job, driver, 101)


def test_if_the_interposer_is_required_the_job_is_left_unchanged(
    job: Counter, driver: CudaDriver, no_vault: pytest.MonkeyPatch
) -> None:
    with pytest.raises(VaultFailed, match=WHY):
        gpucr.suspend(job.pid, gpu_state="interposed")
    assert_right(job, driver, 101)
