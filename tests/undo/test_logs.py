"""gpucr.undo.logs: CRIU's log is kept exactly when its path is reported."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpucr.errors import CriuError
from gpucr.linux.private_folders import state_folder
from gpucr.undo.logs import log_kept_on_failure, remove_left_behind, remove_logs_of

pytestmark = pytest.mark.usefixtures("state_home")


def test_a_log_is_removed_after_success(state_home: Path) -> None:
    with log_kept_on_failure("dump") as path:
        assert path.name == "dump.log"
        assert path.parent.parent == state_home / "gpucr" / "log"
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        path.write_text("CRIU says")
    assert list((state_home / "gpucr" / "log").iterdir()) == []


def test_a_log_is_kept_after_a_failure() -> None:
    error = CriuError("no", phase="restore")
    kept = _fail_with(error, "restore")
    assert kept.read_text() == "CRIU says"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_an_unreported_log_is_removed(error: type[BaseException], state_home: Path) -> None:
    assert not _fail_with(error(), "dump").exists()
    assert list((state_home / "gpucr" / "log").iterdir()) == []


def _fail_with(error: BaseException, phase: str) -> Path:
    """Write a log, fail, and return where the log was."""
    paths: list[Path] = []

    def write_and_fail() -> None:
        with log_kept_on_failure(phase) as path:
            path.write_text("CRIU says")
            paths.append(path)
            raise error

    with pytest.raises(type(error)) as caught:
        write_and_fail()
    assert caught.value is error
    return paths[0]


def test_two_logs_get_different_names() -> None:
    with log_kept_on_failure("dump") as first, log_kept_on_failure("dump") as second:
        assert first != second


def test_a_state_folder_that_cannot_be_written(state_home: Path) -> None:
    state_home.write_text("a file where the folder should be")
    with log_kept_on_failure("dump") as path:
        path.write_text("CRIU says")
        assert state_home not in path.parents
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.parent.exists()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:  # what Path.home() does for a uid without a name and without HOME
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(OSError, match="has no home folder"):
        state_folder()
    with log_kept_on_failure("dump") as path:
        path.write_text("CRIU says")
    assert not path.parent.exists()


def test_the_default_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert state_folder() == tmp_path / "state" / "gpucr"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_folder() == tmp_path / ".local" / "state" / "gpucr"


# --- what a gpucr that was killed has left ---

KILLED = """
import os, signal
from gpucr.undo.logs import log_kept_on_failure, remove_logs_of
with log_kept_on_failure("dump") as path:
    path.write_text("CRIU says")
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _killed() -> int:
    done = subprocess.run([sys.executable, "-c", KILLED], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == -9, done.stderr
    return int(done.stdout)


def test_the_guard_removes_the_log_of_its_gpucr_and_no_other(state_home: Path) -> None:
    kept = _fail_with(CriuError("no", phase="dump"), "dump")
    first, second = _killed(), _killed()
    with log_kept_on_failure("dump") as at_work:
        assert len(list((state_home / "gpucr" / "log").iterdir())) == 4
        remove_logs_of(first)
        remove_logs_of(os.getpid())
        assert at_work.parent.exists()
    left = [folder for folder in (state_home / "gpucr" / "log").iterdir() if folder != kept.parent]
    assert [(folder / ".at-work").read_text() for folder in left] == [str(second)]
    assert kept.exists()


def test_a_later_gpucr_removes_a_log_without_a_writer(state_home: Path) -> None:
    kept = _fail_with(CriuError("no", phase="dump"), "dump")
    _killed()
    base = state_home / "gpucr" / "log"
    (left,) = (folder for folder in base.iterdir() if folder != kept.parent)
    with log_kept_on_failure("dump") as at_work:
        remove_left_behind()
        assert not left.exists()
        assert at_work.parent.exists(), "it is in use"
    assert list(base.iterdir()) == [kept.parent]
