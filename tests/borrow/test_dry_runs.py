"""A dry run refuses what the operation refuses, with the same code: both ask the same functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.jobs import selection
from gpucr.linux import memory
from gpucr.model import CudaState
from tests.counter import Counter, CounterFactory
from tests.unit.children import sleeper

pytestmark = pytest.mark.usefixtures("sim_only")
Refusal: TypeAlias = Callable[["Scene"], contextlib.AbstractContextManager[dict[str, object]]]


class Scene:
    """What a refusal is made of."""

    def __init__(
        self,
        counter: CounterFactory,
        machine: Callable[..., dict[str, str]],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        self.counter, self.machine, self.patch, self.tmp_path = counter, machine, monkeypatch, tmp_path

    def job(self, *arguments: str) -> Counter:
        return self.counter("--mib", "1", *arguments)


@contextlib.contextmanager
def no_cuda(scene: Scene) -> Iterator[dict[str, object]]:
    with sleeper() as process:
        yield {"pid": process.pid}


@contextlib.contextmanager
def busy(scene: Scene) -> Iterator[dict[str, object]]:
    job = scene.job()
    with selection.claimed_job(job.pid):
        yield {"pid": job.pid}


@contextlib.contextmanager
def no_interposer(scene: Scene) -> Iterator[dict[str, object]]:
    yield {"pid": scene.job().pid, "gpu_state": "interposed"}


@contextlib.contextmanager
def no_custom_storage(scene: Scene) -> Iterator[dict[str, object]]:
    yield {"pid": scene.job().pid, "gpu_state": "custom"}


@contextlib.contextmanager
def no_host_memory(scene: Scene) -> Iterator[dict[str, object]]:
    job = scene.job()
    scene.patch.setattr(memory, "machine_available_bytes", lambda: 1 << 10)
    yield {"pid": job.pid}


@contextlib.contextmanager
def older_driver(scene: Scene) -> Iterator[dict[str, object]]:
    scene.patch.setenv("GPUCR_SIM_DRIVER", "615")
    job = scene.job()
    gpucr.suspend(job.pid, gpu_state="custom")
    scene.patch.setenv("GPUCR_SIM_DRIVER", "580")
    yield {"pid": job.pid}
    scene.patch.setenv("GPUCR_SIM_DRIVER", "615")
    gpucr.resume(job.pid)


@contextlib.contextmanager
def full_gpu(scene: Scene) -> Iterator[dict[str, object]]:
    for name, value in scene.machine("1x512MiB", state_dir=scene.tmp_path / "machine").items():
        scene.patch.setenv(name, value)
    job = scene.counter("--mib", "256")
    gpucr.suspend(job.pid)
    scene.counter("--mib", "256")
    yield {"pid": job.pid}


@contextlib.contextmanager
def no_such_gpu(scene: Scene) -> Iterator[dict[str, object]]:
    job = scene.job()
    gpucr.suspend(job.pid)
    yield {"pid": job.pid, "gpu": "7"}


@pytest.fixture
def scene(
    counter: CounterFactory,
    sim_environment: Callable[..., dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Scene:
    return Scene(counter, sim_environment, monkeypatch, tmp_path)


def code_of(call: Callable[[], object]) -> tuple[str, int]:
    with pytest.raises(gpucr.GpucrError) as raised:
        call()
    return raised.value.code, raised.value.exit_code


def code_of_plan(plan: Callable[[], tuple[gpucr.JobOutlook, ...]]) -> tuple[str | None, int]:
    try:
        (outlook,) = plan()
    except gpucr.GpucrError as e:
        return e.code, e.exit_code
    if outlook.error is not None:
        return outlook.error.code, outlook.error.exit_code
    blocking = [finding.code for finding in outlook.findings if finding.severity == "blocking"]
    return (blocking[0], gpucr.Unsupported.exit_code) if blocking else (None, 0)


@pytest.mark.parametrize("refusal", [no_cuda, busy, no_interposer, no_custom_storage, no_host_memory])
def test_suspend(refusal: Refusal, scene: Scene, driver: CudaDriver, tmp_path: Path) -> None:
    with refusal(scene) as options:
        pid = options.pop("pid")
        assert isinstance(pid, int)
        plan = code_of_plan(lambda: gpucr.plan_suspend([pid], **options))  # type: ignore[arg-type]
        assert plan == code_of(lambda: gpucr.suspend(pid, **options))  # type: ignore[arg-type]
        assert plan[1] in (2, 3)


@pytest.mark.parametrize("refusal", [no_cuda, busy, older_driver, full_gpu, no_such_gpu])
def test_resume(refusal: Refusal, scene: Scene, driver: CudaDriver) -> None:
    with refusal(scene) as options:
        pid = options.pop("pid")
        assert isinstance(pid, int)
        plan = code_of_plan(lambda: gpucr.plan_resume([pid], **options))  # type: ignore[arg-type]
        assert plan == code_of(lambda: gpucr.resume(pid, **options))  # type: ignore[arg-type]
        assert plan[1] in (2, 3)
        if refusal is older_driver:
            blocking = [each.code for each in gpucr.doctor(pid).blocking]
            assert "GPUCR-BACKEND" in blocking


@pytest.mark.criu
@pytest.mark.parametrize("refusal", [busy, no_interposer, no_custom_storage, no_host_memory])
def test_dump(refusal: Refusal, scene: Scene, driver: CudaDriver, tmp_path: Path) -> None:
    with refusal(scene) as options:
        pid = options.pop("pid")
        assert isinstance(pid, int)
        try:
            found = gpucr.plan_dump(pid, tmp_path / "s", **options).findings  # type: ignore[arg-type]
            plan = next((each.code or "", 3) for each in found if each.severity == "blocking")
        except gpucr.GpucrError as e:
            plan = e.code, e.exit_code
        assert plan == code_of(lambda: gpucr.dump(pid, tmp_path / "s", **options))  # type: ignore[arg-type]
        assert plan[1] == 3
        assert driver.state(pid) is CudaState.RUNNING
