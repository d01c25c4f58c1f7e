"""No two restores into the same pids."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucr.errors import Unsupported
from gpucr.jobs.pid_claims import claimed_pids
from gpucr.linux.process_records import ProcessRecords
from tests.unit.children import unused_pid


def test_a_pid_is_claimed_once() -> None:
    first, second = unused_pid(), 1
    with claimed_pids([first]):
        with claimed_pids([second]):  # another job
            pass
        with pytest.raises(Unsupported, match=f"restoring a job with process {first}"), claimed_pids([second, first]):
            pass
        with claimed_pids([second]):  # the refused one has left nothing
            pass
    with claimed_pids([first, second]):
        pass


def test_where_there_can_be_no_file_there_is_no_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ProcessRecords, "folder", lambda self: tmp_path / "file" / "folder")
    (tmp_path / "file").touch()
    with claimed_pids([1]), claimed_pids([1]):
        pass
