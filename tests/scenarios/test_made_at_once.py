"""What several gpucr of one user make if it is missing: the one that comes second uses what the first has made."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.interposer import library
from gpucr.interposer.build import LIBRARY
from gpucr.jobs.registry import Registry
from gpucr.linux import locks, processes, trusted_paths
from gpucr.snapshot.manifest import FolderRecord
from gpucr.supervise import start
from gpucr.supervise.folder import SupervisedFolder, SupervisedState
from gpucr.surroundings.folders import MakeFolders
from gpucr.undo.interrupts import Interrupts
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter


def preceded_by(other: Callable[..., object], call: Callable[..., Any]) -> Callable[..., Any]:
    """Another gpucr does something right before the first call, with its arguments."""
    others = [other]

    def both(*arguments: Any, **options: Any) -> Any:
        if others:
            others.pop()(*arguments)
        return call(*arguments, **options)

    return both


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "gpucr"


def test_a_jobs_folder_that_is_removed_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = preceded_by(lambda path, *_: os.rmdir(Path(path).parent), trusted_paths.open_file)
    monkeypatch.setattr(trusted_paths, "open_file", removed)
    with Registry(tmp_path / "jobs").reserve("train") as reservation:
        assert reservation.name == "train"


def test_a_folder_of_sockets_that_two_restores_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sockets"
    made = preceded_by(os.mkdir, trusted_paths.make_folder_for)
    monkeypatch.setattr(trusted_paths, "make_folder_for", made)
    with Protection() as protection:
        step = MakeFolders([FolderRecord(str(folder), 0o755, os.geteuid(), os.getegid())], protection)
        step.run(Interrupts(), Meter("folders"))
        step.undo()
    assert folder.is_dir(), "it is the other's"


def test_an_obstacle_to_a_folder_of_sockets(tmp_path: Path) -> None:
    (tmp_path / "sockets").touch()
    step = MakeFolders([FolderRecord(str(tmp_path / "sockets"), 0o755, os.geteuid(), os.getegid())], Protection())
    with pytest.raises(gpucr.Unsupported, match="cannot be used"):
        step.run(Interrupts(), Meter("folders"))


def test_a_store_that_two_supervised_jobs_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "init_store", preceded_by(gpucr.init_store, gpucr.init_store))
    assert start.require_store(str(tmp_path / "store"), None) == start.require_store(str(tmp_path / "store"), None)


def test_the_interposers_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_compile", lambda work: (work / LIBRARY).write_text("the library"))
    monkeypatch.setattr(library, "_SHIPPED", tmp_path / "not-there")
    monkeypatch.setattr(library, "build_digest", lambda: "0123")
    for number in range(20):
        home = tmp_path / str(number)
        monkeypatch.setenv("XDG_DATA_HOME", str(home))
        with ThreadPoolExecutor(4) as threads:
            (folder,) = set(threads.map(_installed, [threading.Barrier(4)] * 4))
        assert [path.name for path in folder.parent.iterdir()] == ["0123"]
        below = [home, home / "gpucr", home / "gpucr" / "interposer", folder]
        assert {stat.S_IMODE(each.stat().st_mode) for each in below} == {0o755}, "jobs of every user load it"


def _installed(together: threading.Barrier) -> Path:
    together.wait()
    return library.installed()


def test_the_lock_of_a_supervised_job_that_is_held_for_a_moment(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another command, as `gpucr stop`; a supervisor is not waited for."""
    folder = start.prepare("train", gpucr.Supervision(store="/store"))
    fd = os.open(state / "supervise" / "train" / "lock", os.O_RDWR)
    try:
        locks.lock(fd)
        with monkeypatch.context() as patched:
            patched.setattr("gpucr.linux.locks.time.sleep", lambda _: locks.unlock(fd))
            with folder.held():
                pass
        locks.lock(fd)
        me = processes.describe(os.getpid()).id
        folder.write_state(SupervisedState(process=me))
        with pytest.raises(gpucr.InvalidRequest, match="has a supervisor already"), folder.held():
            pass
    finally:
        os.close(fd)


def test_the_state_of_a_supervised_job_that_is_reset(state: Path) -> None:
    folder = start.prepare("train", gpucr.Supervision(store="/store"))
    assert SupervisedFolder("train").state() == SupervisedState()
    (folder.path / "state.json").write_text("{")
    with pytest.raises(gpucr.InvalidRequest, match="cannot be read"):
        folder.state()
