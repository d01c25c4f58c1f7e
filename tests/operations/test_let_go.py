"""An operation closes its files when it ends, not when its error or report is garbage-collected.

A disk with a snapshot could not be unmounted before that, nor its folder be used by another dump.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.linux import capabilities
from gpucr.undo.events import OnProgress, Progress
from tests.conftest import skip_or_fail
from tests.counter import CounterFactory
from tests.storm import later

pytestmark = pytest.mark.criu


@pytest.fixture(autouse=True)
def as_root() -> None:
    if not capabilities.can_checkpoint_processes():
        skip_or_fail("root", "dumps need root")


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Nothing may depend on when it runs."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def below(folder: Path) -> list[str]:
    """What this process has open in a folder."""
    found: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [target for target in found if re.match(rf"{re.escape(str(folder))}(/|$| )", target)]


def fail_at(phase: str) -> OnProgress:
    def listener(progress: Progress) -> None:
        if (progress.event, progress.phase) == ("begin", phase):
            raise RuntimeError(f"at {phase}")

    return listener


@pytest.mark.parametrize("leave_running", [True, later(False)])
def test_a_dump_releases_its_folder(counter: CounterFactory, tmp_path: Path, leave_running: bool) -> None:
    job, disk = counter(), tmp_path / "disk"
    disk.mkdir()
    whole = gpucr.dump(job.pid, tmp_path / "whole", leave_running=True)
    phases = [phase.name for phase in whole.phases if leave_running or phase.name in ("prepare", "lock", "dump")]
    errors = []
    for phase in phases:
        with pytest.raises(RuntimeError, match=f"at {phase}") as caught:
            gpucr.dump(job.pid, disk / phase, leave_running=leave_running, on_progress=fail_at(phase))
        errors.append(caught)  # with its traceback, and all that the frames there refer to
        assert below(disk) == []
    assert len(errors) >= 3
    assert list(disk.iterdir()) == []
    assert job.ask() == 101
    report = gpucr.dump(job.pid, disk / "s", leave_running=leave_running)
    report.snapshot.verify()
    assert below(disk) == [str(disk / "s")]  # the snapshot in the report is open
    del report
    assert below(disk) == []


def test_a_restore_releases_its_folder(counter: CounterFactory, tmp_path: Path) -> None:
    job, place = counter(), tmp_path / "s"
    gpucr.dump(job.pid, place)
    job.reap()
    errors = []
    for phase in ("load", "verify", "keeper", "criu", "hold", "restore"):
        with pytest.raises(RuntimeError, match=f"at {phase}") as caught:
            gpucr.restore(place, on_progress=fail_at(phase))
        errors.append(caught)
        assert below(place) == []
    assert len(errors) == 6
    report = gpucr.restore(place)
    assert below(place) == [str(place)]  # the snapshot in the report is open
    del report
    assert below(place) == []
    assert job.ask() == 101


def test_inspecting_releases_the_folder(counter: CounterFactory, tmp_path: Path) -> None:
    job, place = counter(), tmp_path / "s"
    gpucr.dump(job.pid, place, leave_running=True)
    contents = gpucr.inspect(place)
    assert len(contents.processes) == 1
    del contents
    assert below(place) == []
    opened = gpucr.open_snapshot(place)
    assert isinstance(opened, gpucr.Snapshot)
    opened.verify()
    opened.close()
    opened.close()
    assert below(place) == []
    with pytest.raises(OSError, match="has been closed"):
        opened.verify()
    (place / "manifest.json").write_bytes(b"{}")
    with pytest.raises(gpucr.SnapshotDamaged) as caught:
        gpucr.inspect(place)
    assert below(place) == []
    assert caught.value.exit_code
