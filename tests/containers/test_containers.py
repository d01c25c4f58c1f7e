"""Containers with CUDA processes, checkpointed and restored by their runtimes with gpucr as CRIU's action script."""

from __future__ import annotations

import pytest

from gpucr.model import CudaState
from gpucr.snapshot.folder import Snapshot
from tests.containers.conftest import StartContainer
from tests.containers.container import Container, wait_gone
from tests.storm import later, long

pytestmark = pytest.mark.criu

THREE = ("--fork", "2")

both_runtimes = pytest.mark.parametrize("runtime", ["runc", pytest.param("crun", marks=long)], indirect=True)
_RUNTIMES_AND_COUNTERS = [later("runc", 1), ("runc", 3), later("crun", 1), later("crun", 3)]


def gpu_part(container: Container) -> Snapshot:
    return Snapshot.open(container.images / "gpucr")


@pytest.mark.parametrize(("runtime", "counters"), _RUNTIMES_AND_COUNTERS, indirect=["runtime"])
def test_a_container_is_restored_repeatedly(container: StartContainer, counters: int) -> None:
    made = container("--mib", "4", *(THREE if counters == 3 else ()), counters=counters)
    assert [made.ask(index) for index in range(counters)] == [101] * counters

    done = made.checkpoint()
    assert done.returncode == 0, done.stderr
    wait_gone(made.pid)
    part = gpu_part(made)
    part.verify()
    states = [record.found_state for record in part.manifest.processes]
    assert states == [CudaState.RUNNING] * counters
    assert not part.manifest.left_running
    assert len(part.manifest.device_parts) == counters

    for _ in range(2):
        done = made.restore()
        assert done.returncode == 0, done.stderr
        made.wait_ready()
        assert [made.ask(index) for index in range(counters)] == [102] * counters
        assert made.verify() == ["ok"] * counters
        made.end()


@both_runtimes
def test_a_container_left_running_continues(container: StartContainer) -> None:
    made = container("--mib", "4", *THREE, counters=3)
    assert made.ask() == 101
    done = made.checkpoint("--leave-running")
    assert done.returncode == 0, done.stderr
    assert made.ask() == 102  # answered when its device memory is back
    assert made.verify() == ["ok"] * 3
    part = gpu_part(made)
    part.verify()
    assert part.manifest.left_running
    made.end()

    done = made.restore()
    assert done.returncode == 0, done.stderr
    made.wait_ready()
    assert made.ask() == 102
    assert made.verify() == ["ok"] * 3


def test_a_container_without_cuda_is_left_alone(container: StartContainer) -> None:
    made = container("--no-cuda")
    assert made.ask() == 101
    done = made.checkpoint()
    assert done.returncode == 0, done.stderr
    assert not (made.images / "gpucr").exists()
    assert made.log("checkpoint") == ""
    done = made.restore()
    assert done.returncode == 0, done.stderr
    made.wait_ready()
    assert made.ask() == 102
