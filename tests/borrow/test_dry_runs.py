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
from tests import command
from tests.children import sleeper, tracer_of
from tests.counter import Counter, CounterFactory

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


@contextlib.contextmanager
def taken_place(scene: Scene) -> Iterator[dict[str, object]]:
    (scene.tmp_path / "s").mkdir()
    (scene.tmp_path / "s" / "file").touch()
    yield {"pid": scene.job().pid}


@contextlib.contextmanager
def traced(scene: Scene) -> Iterator[dict[str, object]]:
    job = scene.job()
    with tracer_of(job.pid):
        yield {"pid": job.pid}


@contextlib.contextmanager
def no_place(scene: Scene) -> Iterator[dict[str, object]]:
    yield {"pid": scene.job().pid}


@contextlib.contextmanager
def away(scene: Scene) -> Iterator[dict[str, object]]:
    job = scene.job()
    gpucr.suspend(job.pid)
    yield {"pid": job.pid, "gpu": "1"}


@contextlib.contextmanager
def no_such_target(scene: Scene) -> Iterator[dict[str, object]]:
    yield {"pid": scene.job().pid, "gpu": "7"}


@contextlib.contextmanager
def full_target(scene: Scene) -> Iterator[dict[str, object]]:
    for name, value in scene.machine("2x512MiB", state_dir=scene.tmp_path / "machine").items():
        scene.patch.setenv(name, value)
    job = scene.counter("--mib", "256")
    scene.counter("--mib", "400", "--devices", "1")
    yield {"pid": job.pid, "gpu": "1"}


@contextlib.contextmanager
def job_runs(scene: Scene) -> Iterator[dict[str, object]]:
    gpucr.dump(scene.job().pid, scene.tmp_path / "s", leave_running=True)
    yield {}


@contextlib.contextmanager
def no_such_snapshot(scene: Scene) -> Iterator[dict[str, object]]:
    yield {}


def dumped(scene: Scene) -> None:
    job = scene.job()
    gpucr.dump(job.pid, scene.tmp_path / "s")
    job.reap()


@contextlib.contextmanager
def missing_file(scene: Scene) -> Iterator[dict[str, object]]:
    dumped(scene)
    (scene.tmp_path / "s" / "manifest.json").write_text("{}")
    yield {}


@contextlib.contextmanager
def other_gpus(scene: Scene) -> Iterator[dict[str, object]]:
    dumped(scene)
    for name, value in scene.machine("1x64MiB", state_dir=scene.tmp_path / "machine").items():
        scene.patch.setenv(name, value)
    scene.counter("--mib", "50")
    yield {"gpu": "0"}


@contextlib.contextmanager
def wrong_request(scene: Scene) -> Iterator[dict[str, object]]:
    dumped(scene)
    yield {"files": "throw away"}


@contextlib.contextmanager
def no_sandbox(scene: Scene) -> Iterator[dict[str, object]]:
    dumped(scene)
    yield {"clone": True}


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


def code_of_plan(
    plan: Callable[[], tuple[gpucr.JobOutlook, ...]] | Callable[[], gpucr.Plan],
) -> tuple[str | None, int]:
    try:
        made = plan()
    except gpucr.GpucrError as e:
        return e.code, e.exit_code
    found: gpucr.Plan | gpucr.JobOutlook = made if isinstance(made, gpucr.Plan) else made[0]
    if isinstance(found, gpucr.JobOutlook) and found.error is not None:
        return found.error.code, found.error.exit_code
    blocking = [finding.code for finding in found.findings if finding.severity == "blocking"]
    assert found.is_refused is bool(blocking)
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
@pytest.mark.parametrize("refusal", [busy, no_interposer, no_custom_storage, no_host_memory, taken_place, traced])
def test_dump(refusal: Refusal, scene: Scene, driver: CudaDriver, tmp_path: Path) -> None:
    with refusal(scene) as options:
        pid = options.pop("pid")
        assert isinstance(pid, int)
        plan = code_of_plan(lambda: gpucr.plan_dump(pid, tmp_path / "s", **options))  # type: ignore[arg-type]
        assert plan == code_of(lambda: gpucr.dump(pid, tmp_path / "s", **options))  # type: ignore[arg-type]
        assert plan[1] in (3, 5)
        assert driver.state(pid) is CudaState.RUNNING


@pytest.mark.parametrize("refusal", [no_cuda, busy, no_host_memory, no_place, away, no_such_target, full_target])
def test_move(refusal: Refusal, scene: Scene, driver: CudaDriver) -> None:
    with refusal(scene) as options:
        pid = options.pop("pid")
        assert isinstance(pid, int)
        plan = code_of_plan(lambda: gpucr.plan_move(pid, **options))  # type: ignore[arg-type]
        assert plan == code_of(lambda: gpucr.move(pid, **options))  # type: ignore[arg-type]
        assert plan[1] in (2, 3)


@pytest.mark.parametrize("refusal", [busy, no_interposer, no_custom_storage, no_host_memory, traced])
def test_freeze(refusal: Refusal, scene: Scene, driver: CudaDriver) -> None:
    with refusal(scene) as options:
        pid = options.pop("pid")
        assert isinstance(pid, int)
        plan = code_of_plan(lambda: gpucr.plan_freeze(pid, **options))  # type: ignore[arg-type]
        assert plan == code_of(lambda: gpucr.freeze(pid, **options))  # type: ignore[arg-type]
        assert plan[1] == 3
        assert driver.state(pid) is CudaState.RUNNING


@pytest.mark.criu
@pytest.mark.parametrize("refusal", [job_runs, no_such_snapshot, missing_file, other_gpus, wrong_request, no_sandbox])
def test_restore(refusal: Refusal, scene: Scene, driver: CudaDriver, tmp_path: Path) -> None:
    with refusal(scene) as options:
        plan = code_of_plan(lambda: gpucr.plan_restore(tmp_path / "s", **options))  # type: ignore[arg-type]
        assert plan == code_of(lambda: gpucr.restore(tmp_path / "s", **options))  # type: ignore[arg-type]
        assert plan[1] in (2, 3, 5)


@pytest.mark.criu
def test_a_plan_of_a_restore_starts_nothing(counter: CounterFactory, driver: CudaDriver, tmp_path: Path) -> None:
    job = counter("--mib", "1")
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("*")}
    plan = gpucr.plan_restore(tmp_path / "s")
    assert (plan.pid, plan.is_refused) == (job.pid, False)
    for words in ("CRIU", "restore the processes with CUDA", "unlock"):
        assert any(words in step for step in plan.steps), plan.steps
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "s").rglob("*")} == before
    assert not job.processes()
    assert len(plan.steps) == len(gpucr.restore(tmp_path / "s").phases)
    assert job.ask() == 101


@pytest.mark.criu
def test_the_commands(counter: CounterFactory, driver: CudaDriver, tmp_path: Path) -> None:
    job = counter("--mib", "1")
    moved = command.run_json("move", job.pid, "--gpu", "1", "--dry-run")
    assert moved["pid"] == job.pid
    assert any("to other GPUs" in step or "GPU" in step for step in moved["steps"])
    refused = command.run("restore", tmp_path / "s", "--dry-run")
    assert refused.returncode == 2
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    refused = command.run("restore", tmp_path / "s", "--dry-run")
    assert refused.returncode == 3
    assert "code:  GPUCR-PID-IN-USE" in refused.stderr
    assert job.ask() == 101
