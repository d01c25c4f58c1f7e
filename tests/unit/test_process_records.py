"""gpucr.operations.process_records and gpu_places: what is kept of a process for later commands."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gpucr.linux import processes
from gpucr.model import Gpu, ProcessId
from gpucr.operations import gpu_places
from gpucr.operations.gpu_places import RECORDS, seen_by
from tests.unit.children import identity

A, B, C = (Gpu(index, f"GPU-{index}", "NVIDIA H200", 8, 4) for index in range(3))
ELSEWHERE = Gpu(0, "GPU-9", "NVIDIA H200", 8, 4)
HERE = (A, B, C)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the notes on GPUs, which is not there yet."""
    monkeypatch.setattr(RECORDS, "folder", lambda: tmp_path / "gpus")
    return tmp_path / "gpus"


@pytest.fixture
def me(monkeypatch: pytest.MonkeyPatch) -> ProcessId:
    """This process, which was started to see the second GPU."""
    monkeypatch.setattr(processes, "environment", lambda pid: {"CUDA_VISIBLE_DEVICES": "1"})
    return identity(os.getpid())


def note(process: ProcessId, *gpus: Gpu) -> None:
    RECORDS.write(process, {"gpus": [asdict(gpu) for gpu in gpus]})


def test_the_environment_tells_where_nothing_is_noted(me: ProcessId) -> None:
    assert seen_by(me, HERE) == (B,)


def test_a_note_is_newer_than_the_environment(me: ProcessId) -> None:
    note(me, C, A)
    assert seen_by(me, HERE) == (C, A)
    assert seen_by(me, HERE, used=[C.uuid]) == (C, A)


def test_a_suspended_process_may_be_of_another_machine(me: ProcessId) -> None:
    note(me, ELSEWHERE)
    assert seen_by(me, HERE) == (ELSEWHERE,)


def test_a_process_that_uses_another_gpu_has_been_moved_by_another_tool(me: ProcessId) -> None:
    assert seen_by(me, HERE, used=[A.uuid]) == HERE
    note(me, C)
    assert seen_by(me, HERE, used=[B.uuid]) == HERE


def test_an_environment_that_cannot_be_read_or_names_no_gpu(me: ProcessId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "environment", lambda pid: None)
    assert seen_by(me, HERE) == HERE
    monkeypatch.setattr(processes, "environment", lambda pid: {"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert seen_by(me, HERE) == HERE


GOOD = asdict(C)
DAMAGED: tuple[Any, ...] = (
    None,
    7,
    [],
    {},
    {"gpus": None},
    {"gpus": 7},
    {"gpus": [7]},
    {"gpus": [[]]},
    {"gpus": [{}]},
    *(
        {"gpus": [{**GOOD, key: value}]}
        for key, value in [("index", "1"), ("index", True), ("uuid", None), ("name", 3)]
    ),
    {"gpus": [{**GOOD, "mig_enabled": 0}]},
    {"gpus": [{**GOOD, "more": 1}]},
)


@pytest.mark.parametrize("record", DAMAGED)
def test_a_damaged_note_is_none(record: Any, me: ProcessId, folder: Path) -> None:
    folder.mkdir()
    RECORDS.path(me).write_text(json.dumps(record))
    assert seen_by(me, HERE) == (B,)
    RECORDS.path(me).write_text(json.dumps({"gpus": [GOOD]}))
    assert seen_by(me, HERE) == (C,), "what the damaged ones are made from is read"


def test_a_record_that_is_there_stays() -> None:
    process = identity(os.getpid())
    note(process, A)
    note(process, B)
    assert RECORDS.read(process)["gpus"][0]["uuid"] == A.uuid
    RECORDS.remove(process)
    note(process, B)
    assert RECORDS.read(process)["gpus"][0]["uuid"] == B.uuid


def test_the_records_of_ended_processes_are_removed(folder: Path) -> None:
    alive = identity(os.getpid())
    before = ProcessId(alive.pid, alive.start_time_ticks - 1)  # had the same pid once
    RECORDS.remove_ended()  # no folder yet
    note(alive, A)
    note(before, A)
    of_another_boot = folder / "0a-1-2.json"
    of_another_boot.write_text("{}")
    RECORDS.remove_ended()
    assert sorted(folder.iterdir()) == sorted([RECORDS.path(alive), of_another_boot])


def test_a_note_without_a_folder_is_no_error(monkeypatch: pytest.MonkeyPatch, me: ProcessId) -> None:
    def no_home() -> Path:
        raise FileNotFoundError("uid 1234 has no home folder")

    monkeypatch.setattr(gpu_places.RECORDS, "folder", no_home)
    note(me, A)
    RECORDS.remove_ended()
    assert seen_by(me, HERE) == (B,)
