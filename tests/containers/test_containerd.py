"""containerd, which pauses a container before its checkpoint, stores what there is, and lets it continue."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr import inspect
from gpucr.criu.install import CriuInstall
from gpucr.snapshot.folder import Snapshot
from tests.conftest import skip_or_fail
from tests.containers.containerd import Containerd, check_containerd
from tests.containers.runtimes import RuntimeMissing, check_cgroup2
from tests.counter import wait_until

pytestmark = pytest.mark.criu

REFERENCE = "counter.test/checkpoint:1"


@pytest.fixture
def containerd(sim_only: None, criu_install: CriuInstall, tmp_path: Path) -> Iterator[Containerd]:
    """A containerd of the test's own; a visible skip if it is not installed."""
    try:
        check_cgroup2()
        check_containerd()
    except RuntimeMissing as e:
        skip_or_fail("containerd", str(e))
    started = Containerd(tmp_path, f"gpucr-{secrets.token_hex(8)}", criu_install)
    yield started
    started.close()


def test_a_container_continues_and_is_restored_from_a_checkpoint_image(containerd: Containerd, tmp_path: Path) -> None:
    containerd.run()
    assert containerd.ask() == ["101"] * 3
    done = containerd.ctr("containers", "checkpoint", "--task", "web", REFERENCE)
    assert done.returncode == 0, done.stdout
    assert containerd.ask() == ["102"] * 3
    assert containerd.verify() == ["ok"] * 3
    parts = [name for name in containerd.unpack_stored(tmp_path / "unpacked") if "gpucr" in name]
    assert "gpucr.manifest.json" in parts
    assert not [name for name in parts if "/" in name]
    contents = inspect(tmp_path / "unpacked")
    contents.snapshot.verify()
    assert contents.problems == ()
    assert len(contents.processes) == 3

    for _ in range(2):
        containerd.remove()
        done = containerd.ctr("containers", "restore", "--live", "web", REFERENCE)
        assert done.returncode == 0, done.stdout
        containerd.wait_ready()
        assert containerd.ask() == ["102"] * 3
        assert containerd.verify() == ["ok"] * 3


def test_a_container_is_ended_by_a_checkpoint_into_a_folder(containerd: Containerd, tmp_path: Path) -> None:
    containerd.run()
    images, work = tmp_path / "images", tmp_path / "work"
    done = containerd.ctr("tasks", "checkpoint", "--exit", "--image-path", images, "--work-path", work, "web")
    assert done.returncode == 0, done.stdout
    wait_until(lambda: containerd.status() == "STOPPED", "containerd to know that the container has ended")
    part = Snapshot.open(images / "gpucr")
    part.verify()
    assert len(part.manifest.processes) == 3


def test_a_failure_fails_the_command_and_leaves_the_container_unchanged(containerd: Containerd) -> None:
    containerd.run(faults="checkpoint#1=999")
    assert containerd.ask() == ["101"] * 3
    done = containerd.ctr("containers", "checkpoint", "--task", "web", REFERENCE)
    assert done.returncode != 0
    assert "criu failed: type NOTIFY" in done.stdout
    assert "CUDA_ERROR_UNKNOWN (999)" in containerd.log("criu-dump.log")
    assert containerd.status() == "RUNNING"
    assert containerd.ask() == ["102"] * 3
    assert containerd.verify() == ["ok"] * 3
