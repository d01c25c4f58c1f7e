"""Host memory that is short: jobs go to a folder or a store, or nothing is touched."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gpucr
from gpucr.borrow import lend
from gpucr.errors import StoreError
from gpucr.jobs.registered import registry
from gpucr.linux import memory
from tests.borrow.jobs import Machine
from tests.storm import later

pytestmark = [pytest.mark.root, pytest.mark.criu]

END = [sys.executable, "-I", "-S", "-c", "pass"]


def borrow(*, to: str | None = None, lines: list[str] | None = None, **more: object) -> int:
    said = [] if lines is None else lines
    return gpucr.borrow_gpus(END, "0", to=to, isolate=False, say=said.append, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [later("folder"), "store"])
def test_jobs_that_do_not_fit_in_host_memory_are_dumped(
    shared: Machine, in_room: Callable[[int], None], tmp_path: Path, kind: str
) -> None:
    first, second = shared.job("first", priority=5, mib=120), shared.job("second")
    to = tmp_path / kind
    if kind == "store":
        gpucr.init_store(to)
    assert (first.ask(), second.ask()) == (101, 101)
    in_room(250 << 20)
    lines: list[str] = []
    assert borrow(to=str(to), lines=lines) == 0
    assert any(line.startswith("first made room") and line.endswith("host memory") for line in lines)
    assert any(line.startswith("second made room") and str(to) in line for line in lines)
    assert (first.ask(), second.ask()) == (102, 102)
    assert (second.record.priority, second.is_lent) == (0, False)
    left = gpucr.list_snapshots(to).snapshots if kind == "store" else tuple(to.iterdir())
    assert left == (), "a snapshot that is not needed any more"


def test_without_a_destination_nothing_is_touched(shared: Machine, in_room: Callable[[int], None]) -> None:
    first, second = shared.job("first", priority=5, mib=120), shared.job("second")
    in_room(250 << 20)
    lines: list[str] = []
    with pytest.raises(gpucr.Unsupported, match="the job second: host memory is short") as caught:
        borrow(lines=lines)
    assert (caught.value.code, "--to" in str(caught.value.hint)) == ("GPUCR-HOST-MEMORY", True)
    assert lines == []
    assert (first.ask(), second.ask()) == (101, 101)


def test_a_job_that_ends_with_its_caller_is_never_dumped(
    shared: Machine, in_room: Callable[[int], None], tmp_path: Path
) -> None:
    """Brought back by a borrower it would outlive its caller, as `gpucr batch`. So another is dumped in its place."""
    if memory.lies_in_memory(tmp_path):
        pytest.skip(f"{tmp_path} lies in memory: a dump there needs as much of it as a suspend")
    first, tied = shared.job("first", priority=5, mib=120), shared.job("tied", ends_with_caller=True)
    in_room(250 << 20)
    lines: list[str] = []
    assert borrow(to=str(tmp_path / "snapshots"), lines=lines) == 0
    assert [line.split(" s: it is in ")[1] == "host memory" for line in lines if "made room" in line] == [False, True]
    assert (first.ask(), tied.ask()) == (101, 101)
    in_room(0)
    with pytest.raises(gpucr.Unsupported, match="the job tied: host memory is short") as caught:
        borrow(to=str(tmp_path / "snapshots"))
    assert "free host memory" in str(caught.value.hint)
    assert (first.ask(), tied.ask()) == (102, 102)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("isolate", [later(True), False])
def test_each_restore_decides_whether_a_job_ends_with_its_caller(shared: Machine, isolate: bool, ends: bool) -> None:
    command = [sys.executable, "-I", "-S", "-c", "import time\nwhile True: time.sleep(0.05)"]
    started = gpucr.run_job(command, name="tied", isolate=isolate, ends_with_caller=not ends, cwd=shared.folder)
    assert started.record.ends_with_caller is not ends
    gpucr.dump("tied", shared.folder / "s")
    gpucr.restore(shared.folder / "s", ends_with_caller=ends)
    record = registry().find("tied").record
    assert record is not None
    assert record.ends_with_caller is ends


def test_a_full_store_leaves_all_jobs_unchanged(
    shared: Machine, in_room: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = shared.job("first", priority=5, mib=120), shared.job("second")

    def full(*_: object, **__: object) -> None:
        raise StoreError("no space left on the device", path=str(tmp_path))

    monkeypatch.setattr(lend, "dump", full)
    in_room(250 << 20)
    lines: list[str] = []
    with pytest.raises(StoreError, match="the job second: no space left"):
        borrow(to=str(tmp_path / "snapshots"), lines=lines)
    assert lines == [], "nothing else had been touched yet"
    assert (first.ask(), second.ask(), second.is_lent) == (101, 101, False)


def test_a_cancellation_is_a_signal_to_the_command(shared: Machine) -> None:
    job, cancel = shared.job("train"), gpucr.Cancellation()
    command = ["sh", "-c", "while :; do sleep 0.01; done"]

    def say(line: str) -> None:
        if line.startswith("borrow-1 runs"):
            cancel.cancel("enough")

    assert gpucr.borrow_gpus(command, "0", isolate=False, say=say, cancel=cancel) == 128 + 15
    assert job.ask() == 101
