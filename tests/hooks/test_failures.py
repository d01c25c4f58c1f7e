"""What fails in a hook: the runtime's command fails with the reason, and the container is as it was, or ended."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpucr.hooks import meeting
from gpucr.linux import mounts, processes
from gpucr.snapshot.folder import Snapshot
from tests.counter import wait_until
from tests.hooks.conftest import StartContainer
from tests.hooks.container import KILL_ATTENDANT, KILL_CRIU, Container

pytestmark = pytest.mark.criu

THREE = ("--fork", "2")


def assert_runs_on(container: Container, number: int) -> None:
    """It counts on from there, its device memory is as it was, and nothing of the failed dump is left."""
    assert container.ask() == number
    assert container.verify() == ["ok"] * container.counters
    wait_until(lambda: not (container.images / "gpucr").exists(), "the unfinished GPU part to be removed")


def test_a_failure_before_the_dump_leaves_it_as_it_was(container: StartContainer) -> None:
    made = container("--mib", "4", *THREE, counters=3, faults="checkpoint#1=999")
    made.ask()
    done = made.checkpoint()
    assert done.returncode != 0
    assert "gpucr: error: cannot checkpoint process" in done.stderr
    assert "CUDA_ERROR_UNKNOWN (999)" in done.stderr
    assert_runs_on(made, 102)
    assert made.checkpoint().returncode == 0  # the fault was the first time's


def test_a_failure_after_the_dump_leaves_it_as_it_was(container: StartContainer) -> None:
    lose = 'test $CRTOOLS_SCRIPT_ACTION != post-dump || rm -r "$CRTOOLS_IMAGE_DIR/gpucr/device"'
    made = container("--mib", "4", sabotage=lose)
    made.ask()
    done = made.checkpoint()
    assert done.returncode != 0
    assert "gpucr: error: device memory" in done.stderr
    assert_runs_on(made, 102)


def test_a_criu_that_is_killed_leaves_it_as_it_was(container: StartContainer) -> None:
    made = container("--mib", "4", *THREE, counters=3, sabotage=KILL_CRIU)
    made.ask()
    assert made.checkpoint().returncode != 0
    assert_runs_on(made, 102)


def test_an_attendant_that_is_killed_leaves_it_as_it_was(container: StartContainer) -> None:
    made = container("--mib", "4", sabotage=KILL_ATTENDANT)
    made.ask()
    assert made.checkpoint().returncode != 0
    assert_runs_on(made, 102)

    left = set(meeting.MEETINGS.folder().glob("*.sock"))
    assert made.checkpoint().returncode != 0  # likewise; what the first one has left is removed
    assert_runs_on(made, 103)
    assert not left & set(meeting.MEETINGS.folder().glob("*.sock"))


def test_what_cannot_be_restored_is_refused_before_there_is_a_process(container: StartContainer) -> None:
    made = container("--mib", "4")
    assert made.checkpoint().returncode == 0
    manifest = made.images / "gpucr" / "manifest.json"
    intact = manifest.read_bytes()
    manifest.write_bytes(intact.replace(b'"root_pid": ', b'"root_pid": 1', 1))
    done = made.restore()
    assert done.returncode != 0
    assert "gpucr: error: " in done.stderr
    assert "is not a valid manifest" in done.stderr
    made.end()
    manifest.write_bytes(intact)
    assert made.restore().returncode == 0
    made.wait_ready()
    assert made.verify() == ["ok"]


def test_a_failure_at_the_end_of_a_restore_ends_the_container(container: StartContainer) -> None:
    made = container("--mib", "4", *THREE, counters=3)
    assert made.checkpoint().returncode == 0
    stripe = max((made.images / "gpucr" / "device").iterdir(), key=lambda path: path.stat().st_blocks)
    intact = stripe.read_bytes()
    at = next(index for index, byte in enumerate(intact) if byte)
    stripe.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
    done = made.restore()
    assert done.returncode != 0
    assert "gpucr: error: " in done.stderr
    assert "differs from what was written" in done.stderr
    assert running_in(made) == []
    assert not [point for point in mounts.mount_points() if made.work in point.parents]
    made.end()
    stripe.write_bytes(intact)
    done = made.restore()
    assert done.returncode == 0, done.stderr
    made.wait_ready()
    assert made.verify() == ["ok"] * 3


def test_a_hook_that_is_killed_while_it_restores_leaves_no_container(container: StartContainer) -> None:
    made = container("--mib", "4", faults="restore=hang")
    assert made.checkpoint().returncode == 0
    with ThreadPoolExecutor() as other:
        restoring = other.submit(made.restore)
        # It holds their threads: then the guard knows the container, and the driver's restore is next, which hangs.

        def killed() -> bool:
            for hook in hooks_that_hold(made):
                with contextlib.suppress(ProcessLookupError):  # a thread of the hook's that had done its part
                    os.kill(hook, signal.SIGKILL)
                    return True
            return False

        wait_until(killed, "the hook to hold the container's threads")
        assert restoring.result().returncode == 0  # CRIU and the runtime take no notice
    wait_until(lambda: running_in(made) == [], "the guard to end the container")
    Snapshot.open(made.images / "gpucr").verify()


def test_a_gpu_part_is_never_overwritten(container: StartContainer) -> None:
    made = container("--mib", "4")
    assert made.checkpoint("--leave-running").returncode == 0
    made.ask()
    before = (made.images / "gpucr" / "manifest.json").read_bytes()
    done = made.checkpoint()
    assert done.returncode != 0
    assert "is the GPU part of another checkpoint" in done.stderr
    assert made.verify() == ["ok"]
    assert (made.images / "gpucr" / "manifest.json").read_bytes() == before


def hooks_that_hold(container: Container) -> Iterator[int]:
    """The hooks of gpucr's that trace a process of the container, as CRIU did before."""
    for pid in running_in(container):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            tracer = int(status.partition("TracerPid:")[2].split()[0])
            if tracer and b"gpucr.hooks.action" in Path(f"/proc/{tracer}/cmdline").read_bytes():
                yield tracer


def running_in(container: Container) -> list[int]:
    """The processes that run the container's program."""
    found = []
    for pid in processes.all_pids():
        stat = processes.read_stat(pid)
        if stat is None or stat.status in "ZX":
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[:1] == [b"/counter"] and str(container.port).encode() in words:
                found.append(pid)
    return found


def test_a_cgroup_whose_freezer_would_hang_criu_is_refused(container: StartContainer) -> None:
    own = Path("/proc/self/cgroup").read_text().splitlines()
    if not any("freezer" in line.split(":")[1].split(",") for line in own):
        pytest.skip("this machine has no freezer of cgroup version 1")
    made = container("--mib", "4", cgroup2=False)
    done = made.checkpoint()
    assert done.returncode != 0
    assert "gpucr: error: the container is in a cgroup of version 1's freezer" in done.stderr
    assert_runs_on(made, 101)
