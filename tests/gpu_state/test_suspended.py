"""gpucr.gpu_state.suspended: the record that a suspend leaves for the resume."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gpucr.gpu_state import suspended
from gpucr.gpu_state.suspended import SuspendedRecord, forget, recall, remember
from gpucr.model import CudaState, GangMember, ProcessId

PROCESS = ProcessId(4711, 123456)
RUNNING, LOCKED, CHECKPOINTED = CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the records, which does not exist yet."""
    monkeypatch.setattr(suspended.RECORDS, "folder", lambda: tmp_path / "gpucr" / "suspended")
    return tmp_path / "gpucr" / "suspended"


@pytest.mark.parametrize("found", [RUNNING, LOCKED, CHECKPOINTED])
def test_round_trip(found: CudaState) -> None:
    remember(GangMember(PROCESS, found), {"GPU-a": 8 << 30, "GPU-b": 0})
    lasting = RUNNING if found is LOCKED else found
    assert recall(PROCESS) == SuspendedRecord(lasting, {"GPU-a": 8 << 30, "GPU-b": 0})


def test_other_processes_have_no_record() -> None:
    remember(GangMember(PROCESS, LOCKED), {})
    assert recall(ProcessId(PROCESS.pid, PROCESS.start_time_ticks + 2)) is None
    assert recall(ProcessId(PROCESS.pid + 1, PROCESS.start_time_ticks)) is None


def test_records_are_private(folder: Path) -> None:
    umask = os.umask(0)
    try:
        remember(GangMember(PROCESS, LOCKED), {})
    finally:
        os.umask(umask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (record,) = folder.iterdir()
    assert stat.S_IMODE(record.stat().st_mode) == 0o600


def test_a_second_suspend_keeps_the_first_record() -> None:
    remember(GangMember(PROCESS, RUNNING), {"GPU-a": 8})
    remember(GangMember(PROCESS, CHECKPOINTED), {})
    assert recall(PROCESS) == SuspendedRecord(RUNNING, {"GPU-a": 8})


@pytest.mark.parametrize("found", [RUNNING, LOCKED])
def test_a_record_is_stale_when_another_tool_brought_the_process_back(found: CudaState) -> None:
    remember(GangMember(PROCESS, CHECKPOINTED), {"GPU-a": 8})
    remember(GangMember(PROCESS, found), {"GPU-b": 9})
    assert recall(PROCESS) == SuspendedRecord(RUNNING, {"GPU-b": 9})


def test_forget(folder: Path) -> None:
    remember(GangMember(PROCESS, LOCKED), {})
    forget(PROCESS)
    forget(PROCESS)
    assert recall(PROCESS) is None
    assert list(folder.iterdir()) == []


GOOD = {"found": 2, "device_bytes": {"GPU-a": 8}, "has_hooks": True}
WRONG_STATES: tuple[Any, ...] = (1, 3, 4, 17, -1, "1", None, 1.0, True, [1], {})
WRONG_TABLES: tuple[Any, ...] = (None, [], 8, "x")
WRONG_SIZES: tuple[Any, ...] = (-1, "8", None, 1.5, True, float("nan"), float("inf"))


def test_the_undamaged_sample_is_read(folder: Path) -> None:
    _write(folder, json.dumps(GOOD))
    assert recall(PROCESS) == SuspendedRecord(CHECKPOINTED, {"GPU-a": 8}, has_hooks=True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        json.dumps(GOOD)[:-1],
        "null",
        "[]",
        "7",
        '"found"',
        "{}",
        "[" * 500_000,
        '{"found": 2}',
        '{"device_bytes": {}}',
        *(json.dumps({**GOOD, "found": value}) for value in WRONG_STATES),
        *(json.dumps({**GOOD, "device_bytes": value}) for value in WRONG_TABLES),
        *(json.dumps({**GOOD, "device_bytes": {"GPU-a": value}}) for value in WRONG_SIZES),
        " " * (1 << 20) + json.dumps(GOOD),
    ],
)
def test_a_damaged_record_is_no_record(text: str, folder: Path) -> None:
    _write(folder, text)
    assert recall(PROCESS) is None


def test_a_record_that_is_not_text(folder: Path) -> None:
    _write(folder, "")
    (folder / "4711-123456.json").write_bytes(b"\xff\xfe\x00")
    assert recall(PROCESS) is None


def test_a_suspend_works_without_a_record_folder(folder: Path) -> None:
    folder.parent.write_text("a file where the folder should be")
    remember(GangMember(PROCESS, LOCKED), {})
    assert recall(PROCESS) is None
    forget(PROCESS)


def test_a_user_without_a_home_can_suspend_and_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise FileNotFoundError("uid 1234 has no home folder")

    monkeypatch.setattr(suspended.RECORDS, "folder", no_home)
    remember(GangMember(PROCESS, LOCKED), {})
    assert recall(PROCESS) is None
    forget(PROCESS)


def test_where_the_records_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert suspended.RECORDS.folder() == Path("/run/gpucr/suspended")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert suspended.RECORDS.folder() == tmp_path / "gpucr" / "suspended"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert suspended.RECORDS.folder() == tmp_path / "state" / "gpucr" / "suspended"


def _write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    path = suspended.RECORDS.path(PROCESS)
    assert path.parent == folder
    path.write_text(text)
