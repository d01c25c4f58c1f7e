"""The checks before a dump, on real processes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpucr import records
from gpucr.criu.options import (
    DumpOptions,
    choose_dump_options,
    deleted_file_sizes,
)

SAMPLE = DumpOptions(leave_running=False, shell_job=True, ghost_limit_bytes=1 << 20)


def test_quiet_process() -> None:
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    try:
        chosen = choose_dump_options([child.pid], leave_running=True)
        assert chosen == DumpOptions(True, False, 1 << 20)
    finally:
        child.kill()
        child.wait()


def test_session_leader_outside() -> None:
    child = subprocess.Popen(["sleep", "3600"])
    try:
        assert choose_dump_options([child.pid], leave_running=False).shell_job
        assert not choose_dump_options([child.pid, os.getsid(0)], leave_running=False).shell_job
    finally:
        child.kill()
        child.wait()


def test_an_ended_process() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert choose_dump_options([child.pid], leave_running=False) == DumpOptions(False, False, 1 << 20)


def test_deleted_files(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as open_file, (tmp_path / "b").open("wb") as linked:
        open_file.truncate(5 << 20)
        linked.truncate(7 << 20)
        (tmp_path / "a").unlink()
        (tmp_path / "b").rename(tmp_path / "c")
        memory = os.memfd_create("memory")
        os.truncate(memory, 9 << 20)
        try:
            sizes = list(deleted_file_sizes(os.getpid()))
        finally:
            os.close(memory)
        assert 5 << 20 in sizes
        assert not {7 << 20, 9 << 20} & set(sizes)
        assert choose_dump_options([os.getpid()], leave_running=False).ghost_limit_bytes >= 10 << 20


@pytest.mark.criu
def test_a_deleted_file_that_is_only_mapped(tmp_path: Path) -> None:
    import mmap

    path = tmp_path / "mapped"
    path.write_bytes(bytes(6 << 20))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        file.close()
        path.unlink()
        assert 6 << 20 in list(deleted_file_sizes(os.getpid()))


def test_record_survives_json() -> None:
    assert records.decode(records.encode(SAMPLE), DumpOptions) == SAMPLE


@pytest.mark.parametrize(
    "change",
    [
        {"shell_job": 1},
        {"shell_job": None},
        {"ghost_limit_bytes": True},
        {"ghost_limit_bytes": -1},
        {"ghost_limit_bytes": 1 << 32},
        {"file_locks": "yes"},
        {"more": True},
    ],
)
def test_damaged_record(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(records.RecordError, match=name):
        records.convert({**msgspec.to_builtins(SAMPLE), **change}, DumpOptions)


def test_incomplete_record() -> None:
    record = msgspec.to_builtins(SAMPLE)
    del record["link_remap"]
    with pytest.raises(records.RecordError, match="there is no `link_remap`"):
        records.convert(record, DumpOptions)
