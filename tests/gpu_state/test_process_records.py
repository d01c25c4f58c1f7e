"""gpucr.linux.process_records and gpu_places: records of processes for later commands."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from gpucr.gpu_state import placement
from gpucr.gpu_state.placement import RECORDS, ProcessGpus, gpus_of
from gpucr.linux import processes
from gpucr.model import Gpu, ProcessId
from tests.children import identity

A, B, C = (Gpu(index, f"GPU-{index}", "NVIDIA H200", 8, 4) for index in range(3))
ELSEWHERE = Gpu(0, "GPU-9", "NVIDIA H200", 8, 4)
HERE = (A, B, C)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the notes on GPUs, which does not exist yet."""
    monkeypatch.setattr(RECORDS, "folder", lambda: tmp_path / "gpus")
    return tmp_path / "gpus"


@pytest.fixture
def me(monkeypatch: pytest.MonkeyPatch) -> ProcessId:
    """This process, which was started to see the second GPU."""
    monkeypatch.setattr(processes, "environment", lambda pid: {"CUDA_VISIBLE_DEVICES": "1"})
    return identity(os.getpid())


ONE_VISIBLE, ALL_VISIBLE = ProcessGpus(HERE, (B,)), ProcessGpus(HERE, HERE)


def note(process: ProcessId, *gpus: Gpu, visible: Sequence[Gpu] = ()) -> None:
    uuids = [gpu.uuid for gpu in visible or gpus]
    RECORDS.write(process, {"gpus": [asdict(gpu) for gpu in gpus], "visible": uuids})


def test_without_a_record_the_environment_gives_the_visible_gpus(me: ProcessId) -> None:
    assert gpus_of(me, HERE) == ONE_VISIBLE


def test_a_record_overrides_the_environment(me: ProcessId) -> None:
    note(me, C, A, visible=[A])
    assert gpus_of(me, HERE) == ProcessGpus((C, A), (A,))
    assert gpus_of(me, HERE, used=[A.uuid]) == ProcessGpus((C, A), (A,))


def test_a_suspended_process_may_come_from_another_machine(me: ProcessId) -> None:
    note(me, ELSEWHERE)
    assert gpus_of(me, HERE) == ProcessGpus((ELSEWHERE,), (ELSEWHERE,))


def test_a_process_on_another_gpu_was_moved_by_another_tool(me: ProcessId) -> None:
    assert gpus_of(me, HERE, used=[A.uuid]) == ALL_VISIBLE
    note(me, *HERE, visible=[C])
    assert gpus_of(me, HERE, used=[A.uuid]) == ALL_VISIBLE


def test_a_container_with_two_gpus(me: ProcessId, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = []

    def given(gpus: Sequence[Gpu], root: Path) -> tuple[Gpu, ...]:
        roots.append(root)
        return (B, C)

    monkeypatch.setattr(placement, "gpus_with_device_file", given)
    assert gpus_of(me, HERE) == ProcessGpus((B, C), (C,))  # CUDA_VISIBLE_DEVICES=1 counts the two
    assert gpus_of(me, HERE, used=[B.uuid]) == ProcessGpus((B, C), (B, C))
    assert gpus_of(me, HERE, used=[A.uuid]) == ALL_VISIBLE
    assert roots == [Path(f"/proc/{me.pid}/root")] * 3


@pytest.mark.parametrize(("figures", "visible", "expected"), [
    ({"GPU-2": 5}, [B], {"GPU-2": 5}),
    ({}, [B], {"GPU-1": 7}),
    ({}, [B, C], {"GPU-1": 0, "GPU-2": 0}),
    ({}, HERE, {}),
])  # fmt: skip
def test_gpus_of_a_process_without_nvml_figures(
    figures: dict[str, int], visible: Sequence[Gpu], expected: dict[str, int]
) -> None:
    assert ProcessGpus(HERE, tuple(visible)).held_bytes(figures, 7) == expected


def test_an_environment_that_is_unreadable_or_names_no_gpu(me: ProcessId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "environment", lambda pid: None)
    assert gpus_of(me, HERE) == ALL_VISIBLE
    monkeypatch.setattr(processes, "environment", lambda pid: {"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert gpus_of(me, HERE) == ALL_VISIBLE


GOOD = asdict(C)
NO_GPUS: tuple[Any, ...] = (None, 7, "GPU-2", {}, {"GPU-2": 1}, [], [None], [7], [[]], [{}])
DAMAGED: tuple[Any, ...] = (
    None,
    7,
    [],
    {},
    *({"gpus": damaged, "visible": [C.uuid]} for damaged in NO_GPUS),
    *({"gpus": [GOOD], "visible": visible} for visible in (None, 7, [], [7], ["GPU-9"])),
    {"gpus": [GOOD]},
    *(
        {"gpus": [{**GOOD, key: value}], "visible": [C.uuid]}
        for key, value in [("index", "1"), ("index", True), ("uuid", None), ("name", 3)]
    ),
    {"gpus": [{**GOOD, "mig_enabled": 0}], "visible": [C.uuid]},
    {"gpus": [{**GOOD, "more": 1}], "visible": [C.uuid]},
)


@pytest.mark.parametrize("record", DAMAGED)
def test_a_damaged_record_is_ignored(record: Any, me: ProcessId, folder: Path) -> None:
    folder.mkdir()
    RECORDS.path(me).write_text(json.dumps(record))
    assert gpus_of(me, HERE) == ONE_VISIBLE
    RECORDS.path(me).write_text(json.dumps({"gpus": [GOOD], "visible": [C.uuid]}))
    assert gpus_of(me, HERE).known == (C,), "what the damaged ones are made from is read"


def test_an_existing_record_is_kept() -> None:
    process = identity(os.getpid())
    note(process, A)
    note(process, B)
    assert gpus_of(process, HERE).known == (A,)
    RECORDS.remove(process)
    note(process, B)
    assert gpus_of(process, HERE).known == (B,)


def test_a_record_matches_a_process_whose_start_differs_by_a_tick() -> None:
    """By a gpucr in another time namespace (`ProcessId.is_same`)."""
    alive = identity(os.getpid())
    for ticks in (-1, 0, 1):
        seen = replace(alive, start_time_ticks=alive.start_time_ticks + ticks)
        note(seen, A)
        RECORDS.remove_ended()
        note(alive, B)  # it has a record
        assert RECORDS.is_written(alive)
        assert gpus_of(alive, HERE).known == (A,)
        RECORDS.remove(alive)
        assert not RECORDS.is_written(seen)


def test_the_records_of_ended_processes_are_removed(folder: Path) -> None:
    alive = identity(os.getpid())
    before = ProcessId(alive.pid, alive.start_time_ticks - 2)  # had the same pid once
    RECORDS.remove_ended()  # no folder yet
    note(alive, A)
    note(before, A)
    of_another_boot = folder / "0a-1-2.json"
    of_another_boot.write_text("{}")
    RECORDS.remove_ended()
    assert sorted(folder.iterdir()) == sorted([RECORDS.path(alive), of_another_boot])


def test_a_record_without_a_folder_is_no_error(monkeypatch: pytest.MonkeyPatch, me: ProcessId) -> None:
    def no_home() -> Path:
        raise FileNotFoundError("uid 1234 has no home folder")

    monkeypatch.setattr(placement.RECORDS, "folder", no_home)
    note(me, A)
    RECORDS.remove_ended()
    assert gpus_of(me, HERE) == ONE_VISIBLE
