"""Containers that are paused before they are checkpointed, as containerd does, and continue afterwards."""

from __future__ import annotations

import subprocess

import pytest

from gpucr.snapshot.folder import Snapshot
from tests import command
from tests.containers.conftest import StartContainer
from tests.containers.container import KILL_ATTENDANT, KILL_CRIU, Container, wait_gone
from tests.counter import wait_until
from tests.storm import later, long

pytestmark = pytest.mark.criu

THREE = ("--fork", "2")


def pause(container: Container) -> None:
    assert container.runtime("pause", container.name).returncode == 0
    assert container.state()["status"] == "paused"


def checkpoint_paused(container: Container, *, is_paused_after: bool = True) -> subprocess.CompletedProcess[str]:
    """As containerd does it: pause, checkpoint, and continue, even after a failure."""
    pause(container)
    done = container.checkpoint("--leave-running")
    if is_paused_after:
        assert container.state()["status"] == "paused"
    container.runtime("resume", container.name)
    return done


def test_a_paused_container_is_dumped_paused_and_continues_when_resumed(container: StartContainer) -> None:
    made = container("--mib", "4", *THREE, counters=3)
    assert made.ask() == 101
    done = checkpoint_paused(made)
    assert done.returncode == 0, done.stderr
    assert made.ask() == 102
    assert made.verify() == ["ok"] * 3
    Snapshot.open(made.images / "gpucr").verify()
    made.end()

    done = made.restore()
    assert done.returncode == 0, done.stderr
    made.wait_ready()
    assert made.ask() == 102
    assert made.verify() == ["ok"] * 3


def test_a_paused_container_is_ended_by_the_dump(container: StartContainer) -> None:
    made = container("--mib", "4")
    made.ask()
    pause(made)
    done = made.checkpoint()
    assert done.returncode == 0, done.stderr
    wait_gone(made.pid)
    done = made.restore()
    assert done.returncode == 0, done.stderr
    made.wait_ready()
    assert made.ask() == 102
    assert made.verify() == ["ok"]


LOSE = 'test $CRTOOLS_SCRIPT_ACTION != post-dump || rm -r "$CRTOOLS_IMAGE_DIR/gpucr/device"'


@pytest.mark.parametrize(
    ("faults", "sabotage", "is_paused_after"),
    [  # CRIU thaws as soon as it traces all
        later("checkpoint#1=999", "", True), ("", LOSE, True), ("", KILL_CRIU, False),
    ],
    ids=["before the dump", "after the dump", "CRIU is killed"],
)  # fmt: skip
def test_a_paused_container_is_unchanged_after_a_failed_dump(
    container: StartContainer, faults: str, sabotage: str, is_paused_after: bool
) -> None:
    made = container("--mib", "4", *THREE, counters=3, faults=faults, sabotage=sabotage)
    made.ask()
    done = checkpoint_paused(made, is_paused_after=is_paused_after)
    assert done.returncode != 0
    assert made.ask() == 102
    assert made.verify() == ["ok"] * 3
    wait_until(lambda: not (made.images / "gpucr").exists(), "the unfinished GPU part to be removed")


def test_a_paused_container_without_cuda_stays_paused(container: StartContainer) -> None:
    made = container("--no-cuda")
    done = checkpoint_paused(made)
    assert done.returncode == 0, done.stderr
    assert not (made.images / "gpucr").exists()
    assert made.ask() == 101


@long
def test_a_killed_attendant_leaves_a_paused_container_unchanged(container: StartContainer) -> None:
    made = container("--mib", "4", sabotage=KILL_ATTENDANT)
    made.ask()
    assert checkpoint_paused(made, is_paused_after=False).returncode != 0
    assert made.ask() == 102
    assert made.verify() == ["ok"]


def test_a_frozen_process_is_refused_instead_of_waited_for(container: StartContainer) -> None:
    made = container("--mib", "4")
    pause(made)
    done = command.run("suspend", made.pid)
    assert done.returncode == 3
    assert "is frozen, and the driver can reach only a process that runs" in done.stderr
    assert made.runtime("resume", made.name).returncode == 0
    assert made.ask() == 101
