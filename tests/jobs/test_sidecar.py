"""What a supervisor and a forwarder keep of their job, and how they are started: both in the same way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpucr.errors import BrokenInstall, DeadlineExceeded, InvalidRequest
from gpucr.jobs import sidecar_process
from gpucr.jobs.sidecar import Journal, SidecarFolder
from gpucr.linux import locks, processes
from gpucr.model import ProcessId
from gpucr.on_demand.folder import OnDemandFolder
from gpucr.on_demand.settings import OnDemand
from gpucr.supervise.folder import SupervisedFolder
from gpucr.supervise.settings import Supervision
from tests.counter import wait_until
from tests.lines import complete_lines

Folder = SidecarFolder[Any, Any]


@pytest.fixture(params=["supervisor", "forwarder"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """The folder of a prepared job, of each kind."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made: Folder
    if request.param == "supervisor":
        made = SupervisedFolder("train")
        made.write_settings(Supervision(store="/store", every_s=60.0))
    else:
        made = OnDemandFolder("train")
        made.write_settings(OnDemand(("8000:8001",)))
    return made


def test_only_one_has_the_job(folder: Folder) -> None:
    """As long as its state says that it is there, whoever holds the lock."""
    folder.write_state(folder.state().__class__(process=processes.this_process()))
    assert folder.running() == processes.this_process()
    with folder.held(), pytest.raises(InvalidRequest, match=f"has a {folder.WORD} already") as caught, folder.held():
        pass
    assert (caught.value.code, caught.value.hint) == (
        folder.TAKEN_CODE,
        f"`{folder.LEAVE.format(name='train')}` ends it, and leaves the job as it is",
    )


def test_another_job_of_the_name_is_not_served_as_the_earlier_one(folder: Folder) -> None:
    folder.write_state(folder.state().__class__(process=processes.this_process()))
    folder.append_event({"event": "begun"})
    assert type(folder).all()
    folder.forget()
    assert not type(folder).all()
    assert folder.state().process is None
    assert folder.events_path.exists()
    with pytest.raises(InvalidRequest, match=f"the job train is not {folder.SERVED}") as caught:
        folder.settings()
    assert caught.value.code == folder.NONE_CODE


def test_an_end_before_it_is_ready(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(folder), "MODULE", "os")  # has no `main`
    with pytest.raises(BrokenInstall, match=f"the {folder.WORD} of train has ended before it was at work") as caught:
        sidecar_process.start(folder)
    assert caught.value.hint == f"its output is in {folder.log_path}"
    assert "has no attribute 'main'" in folder.log_path.read_text()


def test_missing_ones_are_started_and_a_damaged_job_does_not_stop_that(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = type(folder)("another")
    other.write_settings(folder.settings())
    (other.path / "state.json").write_text("{")
    monkeypatch.setattr(sidecar_process, "start", lambda _: 4711)
    found = sidecar_process.start_missing(type(folder).all(), lambda each: each.state().process is None)
    assert [(each.name, each.pid) for each in found] == [("another", None), ("train", 4711)]
    assert "state.json" in (found[0].problem or "")


def test_no_end_in_time(folder: Folder) -> None:
    wait = "import signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(flush=True)\ntime.sleep(60)"

    with subprocess.Popen([sys.executable, "-c", wait], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        stat = processes.read_stat(child.pid)
        assert stat is not None
        child_id = ProcessId(child.pid, stat.start_time_ticks)
        folder.write_state(folder.state().__class__(process=child_id))
        try:
            with pytest.raises(DeadlineExceeded, match=f"the {folder.WORD}s of train are still at work"):
                sidecar_process.end([folder], signal.SIGTERM, all_run=True, timeout_s=0.0)
        finally:
            child.kill()
    with pytest.raises(InvalidRequest, match=f"the job train has no {folder.WORD}"):
        sidecar_process.end([folder], signal.SIGTERM, all_run=True, timeout_s=None)
    assert sidecar_process.end([folder], signal.SIGTERM, all_run=False, timeout_s=None) == ()


def test_every_event_goes_to_the_log_and_to_the_users_command(folder: Folder, tmp_path: Path) -> None:
    got = tmp_path / "got"
    journal = Journal(folder, ["tee", "-a", str(got)], lambda: 1800000000.25)
    journal.tell("begun", number=3, why=None)
    wait_until(lambda: bool(complete_lines(got)), "the command to get the event")
    (told,) = complete_lines(got)
    assert complete_lines(folder.events_path) == [told]
    assert json.loads(told) == {
        "time": "2027-01-15T08:00:00.250+00:00", "event": "begun", "job": "train", "pid": os.getpid(),
        "number": 3, "why": None,
    }  # fmt: skip


def test_a_command_that_fails_stops_nothing(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    said = ""

    def has_said() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "--on-event /no/such/program: " in said

    Journal(folder, ["/no/such/program"]).tell("begun")
    wait_until(has_said, "the complaint")
    assert len(complete_lines(folder.events_path)) == 1


def test_a_sidecar_that_begins_during_a_removal_keeps_its_folder(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rmdir
    with contextlib.ExitStack() as another:

        def rmdir(*arguments: Any, **options: Any) -> None:
            monkeypatch.setattr(os, "rmdir", real)
            another.enter_context(type(folder)("train").held())
            real(*arguments, **options)

        monkeypatch.setattr(os, "rmdir", rmdir)
        folder.remove()
        assert os.rmdir is real
        assert os.listdir(folder.path) == ["lock"]
        with pytest.raises(InvalidRequest, match="already"), folder.held():
            pass
    folder.remove()
    assert os.listdir(folder.path.parent) == []


def test_a_lock_of_a_removed_folder_is_not_the_sidecars(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was removed while this one waited: it takes the lock of the folder that is there now."""
    real = locks.lock

    def lock(fd: int, **options: Any) -> None:
        monkeypatch.setattr(locks, "lock", real)
        type(folder)("train").remove()
        real(fd, **options)

    monkeypatch.setattr(locks, "lock", lock)
    with folder.held(), pytest.raises(InvalidRequest, match="already"), type(folder)("train").held():
        pass
