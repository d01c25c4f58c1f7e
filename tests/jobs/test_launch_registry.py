"""The registry of jobs: names, records, states of jobs, and concurrent use."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from gpucr.errors import InvalidRequest, Unsupported
from gpucr.jobs import record as records
from gpucr.jobs import registry as registries
from gpucr.jobs.names import check_name, is_name, near_names, numbered_names
from gpucr.jobs.record import JobRecord, JobState, decode, state_of
from gpucr.jobs.registry import Registry
from gpucr.linux import locks
from gpucr.model import ProcessId
from gpucr.records import RecordError, encode
from tests.children import identity, sleeper, unused_pid


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "state" / "jobs")


def _record(tmp_path: Path, root: ProcessId, **changes: Any) -> JobRecord:
    made = JobRecord(
        name="train-1",
        command=("python", "töst.py", "\udcff"),
        cwd="/srv",
        environment={"NCCL_P2P_DISABLE": "1"},
        isolated=True,
        network="own",
        io_uring_is_refused=True,
        created="2026-01-02T03:04:05+00:00",
        root=root,
        keeper=root,
        log_path=str(tmp_path / "log"),
        status_path=str(tmp_path / "status"),
    )
    return replace(made, **changes)


def _register(registry: Registry, name: str, root: ProcessId, tmp_path: Path, **changes: Any) -> JobRecord:
    with registry.reserve(name) as reservation:
        return reservation.register(_record(tmp_path, root, **changes))


def _ended() -> ProcessId:
    """A process that was there."""
    return ProcessId(unused_pid(), 1)


# --- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "0a", "train-1", "a.b_c-d", "x" * 63])
def test_names(name: str) -> None:
    assert is_name(name)
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "4711", "-a", ".a", "A", "a b", "a/b", "..", "x" * 64, "ä", "a\n", "١٢"])
def test_invalid_names(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(InvalidRequest, match="cannot be the name of a job"):
        check_name(name)


@pytest.mark.parametrize(
    ("base", "first", "expected"),
    [
        ("python3.11", 1, "python3.11-1"),
        ("My Prog!", 2, "my-prog-2"),
        ("---", 1, "job-1"),
        ("x" * 99, 1, "x" * 48 + "-1"),
    ],
)
def test_numbered_names_are_names(base: str, first: int, expected: str) -> None:
    names = numbered_names(base, first)
    assert next(names) == expected
    assert is_name(next(names))


def test_similar_names_are_suggested() -> None:
    assert near_names("trian", ["train", "serve", "train-2"])[0] == "train"


# --- records ---------------------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    for changes in ({}, {"keeper": None, "snapshot": "/snap", "dumped": True}):
        record = _record(tmp_path, ProcessId(7, 8), **changes)
        assert decode(encode(record)) == record


def _damage(tmp_path: Path, **members: Any) -> bytes:
    body = json.loads(encode(_record(tmp_path, ProcessId(7, 8))))
    return json.dumps({**body, **members}).encode()


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"format_version": 2}, "its format_version is 2; this gpucr reads 1"),
        ({"name": "../up"}, "cannot be the name"),
        ({"name": 7}, "name: expected `str`, got `int`"),
        ({"command": []}, "command is empty"),
        ({"command": "ls"}, "command: expected `array`, got `str`"),
        ({"command": [1]}, r"command\[0\]: expected `str`, got `int`"),
        ({"cwd": "a\0b"}, "cwd: expected `str` matching regex"),
        ({"environment": {"A": 1}}, "environment.*: expected `str`, got `int`"),
        ({"environment": []}, "environment: expected `object`, got `array`"),
        ({"isolated": 1}, "isolated: expected `bool`, got `int`"),
        ({"network": "shared"}, "network: invalid enum value 'shared'"),
        ({"root": None}, "root: expected `object`, got `null`"),
        ({"root": {"pid": 0, "start_time_ticks": 1}}, "the pid of a process is 0"),
        ({"root": {"pid": 1}}, "root: there is no `start_time_ticks`"),
        ({"root": {"pid": True, "start_time_ticks": 1}}, "root.pid: expected `int`, got `bool`"),
        ({"keeper": {"pid": -1, "start_time_ticks": 1}}, "a number is out of range"),
        ({"pid_namespace": 1 << 70}, "a number is out of range"),
        ({"snapshot": 3}, "snapshot: expected `str \\| null`, got `int`"),
    ],
)
def test_a_damaged_record_is_recognised(members: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=why):
        decode(_damage(tmp_path, **members))


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{", b"[" * 100_000])
def test_not_a_record(data: bytes) -> None:
    with pytest.raises(RecordError):
        decode(data)


def test_every_member_is_needed(tmp_path: Path) -> None:
    body = json.loads(encode(_record(tmp_path, ProcessId(7, 8))))
    for name in body:
        with pytest.raises(RecordError):
            decode(json.dumps({key: value for key, value in body.items() if key != name}).encode())


# --- what has become of a job ----------------------------------------------------------------------------------


def test_a_running_job(tmp_path: Path) -> None:
    with sleeper() as child:
        assert state_of(_record(tmp_path, child.id)) == JobState("running")


def test_a_reused_pid(tmp_path: Path) -> None:
    with sleeper() as child:
        other = ProcessId(child.pid, child.id.start_time_ticks - 2)
        assert state_of(_record(tmp_path, other)) == JobState("lost")


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"exit_code": 3, "ended": "2026-01-02T03:04:05+00:00"}, JobState("ended", exit_code=3)),
        ({"signal": 9, "ended": "2026-01-02T03:04:05+00:00"}, JobState("ended", signal=9)),
        ({"exit_code": 0, "signal": None}, JobState("ended", exit_code=0)),
        ({"exit_code": 0, "signal": 9}, JobState("lost")),
        ({"exit_code": -1}, JobState("lost")),
        ({"exit_code": "0"}, JobState("lost")),
        ({}, JobState("lost")),
        ([], JobState("lost")),
    ],
)
def test_an_ended_job(status: Any, state: JobState, tmp_path: Path) -> None:
    record = _record(tmp_path, _ended())
    Path(record.status_path).write_text(json.dumps(status))
    assert state_of(record) == state


def test_a_job_whose_keeper_has_not_written_the_exit_status_yet(tmp_path: Path) -> None:
    with sleeper() as keeper:
        record = _record(tmp_path, _ended(), keeper=keeper.id)
        assert state_of(record) == JobState("running")
    assert state_of(record) == JobState("lost")


def test_a_restored_job_without_a_keeper(tmp_path: Path) -> None:
    assert state_of(_record(tmp_path, _ended(), keeper=None)) == JobState("ended")


def test_states_of_a_dumped_job(tmp_path: Path) -> None:
    with sleeper() as child:
        assert state_of(_record(tmp_path, child.id, dumped=True)) == JobState("running")
        assert state_of(_record(tmp_path, child.id, dumped=True, boot_id="another")) == JobState("dumped")
    record = _record(tmp_path, _ended(), dumped=True)
    assert state_of(record) == JobState("dumped")
    Path(record.status_path).write_text('{"signal": 9}')
    assert state_of(record) == JobState("dumped"), "so CRIU ends it"
    for status, expected in (
        ('{"signal": 15}', JobState("ended", signal=15)),
        ('{"exit_code": 0}', JobState("ended", exit_code=0)),
    ):
        Path(record.status_path).write_text(status)
        assert state_of(record) == expected, "it continued after the snapshot"


def test_a_reboot_and_another_machine(tmp_path: Path) -> None:
    with sleeper() as child:  # the same pid and start time mean nothing there
        rebooted = _record(tmp_path, child.id, boot_id="another")
        assert state_of(rebooted) == JobState("lost")
        assert state_of(replace(rebooted, host="another")) == JobState("elsewhere")
        in_a_container = _record(tmp_path, child.id, pid_namespace=1)
        assert state_of(replace(in_a_container, status_path="/none/x.status")) == JobState("elsewhere")
        assert state_of(replace(in_a_container, keeper=None)) == JobState("elsewhere"), "nobody says that it has ended"
        folder = os.open(Path(in_a_container.status_path).parent, os.O_RDONLY)
        locks.share(folder)  # as its keeper does
        assert state_of(in_a_container) == JobState("elsewhere")
        os.close(folder)
        assert state_of(in_a_container) == JobState("lost")
        Path(rebooted.status_path).write_text('{"exit_code": 0}')
        assert state_of(rebooted) == JobState("ended", exit_code=0)


# --- the registry ----------------------------------------------------------------------------------------------


def test_an_empty_registry(registry: Registry) -> None:
    assert registry.jobs() == ()
    with pytest.raises(InvalidRequest, match="there is no job 'train'") as caught:
        registry.find("train")
    assert caught.value.hint == "`gpucr jobs --all` lists the jobs that gpucr started"


def test_a_registered_job_can_be_found(registry: Registry, tmp_path: Path) -> None:
    with sleeper() as child:
        record = _register(registry, "train", child.id, tmp_path)
        assert record.name == "train"
        (job,) = registry.jobs()
        assert job == registry.find("train")
        assert (job.record, job.state.word) == (record, "running")
        assert registry.find_process(child.id) == record
        assert registry.find_process(structs.replace(child.id, start_time_ticks=1)) is None
        with pytest.raises(InvalidRequest) as caught:
            registry.find("trian")
        assert caught.value.hint == "did you mean train?"


def test_everything_in_it_is_private(registry: Registry, tmp_path: Path) -> None:
    with sleeper() as child:
        _register(registry, "train", child.id, tmp_path)
    found = list((tmp_path / "state").rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in found if path.is_file()} == {0o600}


def test_the_name_of_a_running_job_is_taken(registry: Registry, tmp_path: Path) -> None:
    with sleeper() as child:
        record = _register(registry, "train", child.id, tmp_path)
        with pytest.raises(InvalidRequest, match="the job train is running: its name is taken") as caught:
            _register(registry, "train", child.id, tmp_path)
        assert str(child.pid) in str(caught.value.hint)
        assert registry.find("train").record == record
        with pytest.raises(InvalidRequest, match="it cannot be forgotten"):
            registry.forget("train")


def test_the_name_of_an_ended_job_is_free_and_its_log_is_kept(registry: Registry, tmp_path: Path) -> None:
    with registry.reserve("train") as first:
        first.log_path.write_text("first")
        first.status_path.write_text('{"exit_code": 0}')
        first.register(_record(tmp_path, _ended()))
    assert registry.find("train").state == JobState("ended", exit_code=0)
    with sleeper() as child:
        with registry.reserve("train") as second:
            assert {second.log_path, second.status_path}.isdisjoint({first.log_path, first.status_path})
            second.register(_record(tmp_path, child.id))
        assert registry.find("train").state.word == "running"
        assert first.log_path.read_text() == "first"


def test_an_exit_status_is_removed_when_another_job_takes_the_name(registry: Registry, tmp_path: Path) -> None:
    first = _register(registry, "train", _ended(), tmp_path)
    Path(first.status_path).write_text('{"exit_code": 3, "ended": "2026-01-02T03:04:05+00:00"}')
    with contextlib.suppress(KeyboardInterrupt), registry.reserve("train") as reservation:
        reservation.register(_record(tmp_path, _ended()))
        raise KeyboardInterrupt
    assert registry.find("train").state.exit_code == 3, "not for a start that failed"
    second = _register(registry, "train", _ended(), tmp_path)
    Path(second.status_path).write_text('{"exit_code": 4, "ended": "2026-01-02T03:04:06+00:00"}')
    assert list(Path(second.status_path).parent.glob("*.status")) == [Path(second.status_path)]
    assert registry.find("train").state.exit_code == 4


def test_a_dumped_job_keeps_its_name_until_it_is_restored_or_forgotten(registry: Registry, tmp_path: Path) -> None:
    snapshot = tmp_path / "snap"
    record = _register(registry, "train", _ended(), tmp_path, snapshot=str(snapshot), dumped=True)
    with pytest.raises(InvalidRequest, match="is dumped") as caught:
        _register(registry, "train", _ended(), tmp_path)
    assert f"its snapshot {snapshot} is gone" in str(caught.value.hint)
    snapshot.mkdir()
    (snapshot / "manifest.json").touch()
    with pytest.raises(InvalidRequest, match="is dumped") as caught:
        _register(registry, "train", _ended(), tmp_path)
    assert f"gpucr restore {snapshot}" in str(caught.value.hint)
    with registry.reserve("train", replaces=lambda job: job.state.word == "dumped") as reservation:
        reservation.register(replace(record, dumped=False))
    assert registry.find("train").state.word != "dumped"


def _fail_to_start(registry: Registry) -> None:
    with contextlib.suppress(ZeroDivisionError), registry.reserve("train") as reservation:
        reservation.log_path.write_text("it said why")
        raise ZeroDivisionError


def test_a_failed_start_changes_nothing(registry: Registry, tmp_path: Path) -> None:
    _fail_to_start(registry)
    assert list((tmp_path / "state" / "jobs").iterdir()) == []

    record = _register(registry, "train", _ended(), tmp_path)
    before = sorted(path.name for path in (tmp_path / "state" / "jobs" / "train").iterdir())
    _fail_to_start(registry)
    assert registry.find("train").record == record
    assert sorted(path.name for path in (tmp_path / "state" / "jobs" / "train").iterdir()) == before


def test_a_registered_job_that_never_ran_changes_nothing(registry: Registry, tmp_path: Path) -> None:
    for names_before in ([], ["train"]):
        before = [_register(registry, name, _ended(), tmp_path) for name in names_before]
        with contextlib.suppress(ZeroDivisionError), registry.reserve("train") as reservation:
            reservation.register(_record(tmp_path, _ended(), command=("other",)))
            raise ZeroDivisionError
        assert [job.record for job in registry.jobs()] == before


def test_the_users_own_log_is_never_removed(registry: Registry, tmp_path: Path) -> None:
    own = tmp_path / "own.log"
    own.write_text("mine")
    with pytest.raises(ZeroDivisionError), registry.reserve("train", log_path=own):
        raise ZeroDivisionError
    assert own.read_text() == "mine"
    with registry.reserve("train", log_path=own) as reservation:
        reservation.register(_record(tmp_path, _ended(), log_path=str(own)))
    registry.forget("train")
    assert own.read_text() == "mine"


def test_numbered_names_skip_taken_ones(registry: Registry, tmp_path: Path) -> None:
    with sleeper() as child:
        for expected in ("train-1", "train-2"):
            with registry.reserve_numbered("train") as reservation:
                reservation.register(_record(tmp_path, child.id))
            assert reservation.name == expected
        with registry.reserve_numbered("train", first=2) as reservation:
            assert reservation.name == "train-3"
        with registry.reserve_numbered("train") as reservation:
            assert reservation.name == "train-3", "the name that was given up is free again"


def test_forgetting(registry: Registry, tmp_path: Path) -> None:
    _register(registry, "train", _ended(), tmp_path)
    assert registry.forget("train").state.word == "lost"
    assert registry.jobs() == ()
    with pytest.raises(InvalidRequest, match="there is no job 'train'"):
        registry.forget("train")


def test_forgetting_while_the_keeper_writes_the_exit_status(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds no folder of that name, or leaves a file in the one that is being removed."""
    _register(registry, "train", _ended(), tmp_path)
    folder = tmp_path / "state" / "jobs" / "train"
    status = registry.find("train").readable().status_path

    def late() -> None:
        with pytest.raises(FileNotFoundError):
            Path(status).write_text("{}")
        (left,) = folder.parent.glob(".removed-*")
        (left / "status").write_text("{}")

    _during_the_removal(monkeypatch, late)
    registry.forget("train")
    assert registry.jobs() == ()
    with registry.reserve("other"):
        pass
    assert os.listdir(folder.parent) == []


def test_a_job_that_may_run_elsewhere_is_forgotten_only_with_force(registry: Registry, tmp_path: Path) -> None:
    _register(registry, "train", _ended(), tmp_path, boot_id="another", host="node7")
    with pytest.raises(InvalidRequest, match="elsewhere") as caught:
        registry.forget("train")
    assert "node7" in str(caught.value.hint)
    assert "--forget train --force" in str(caught.value.hint)
    assert registry.forget("train", force=True).state.word == "elsewhere"
    assert registry.jobs() == ()
    with sleeper() as child:
        _register(registry, "train", child.id, tmp_path)
        with pytest.raises(InvalidRequest, match="is running"):
            registry.forget("train", force=True)


def test_forgetting_keeps_a_log_that_another_job_writes(registry: Registry, tmp_path: Path) -> None:
    with registry.reserve("train") as old:
        old.log_path.write_text("old")
        old.register(_record(tmp_path, _ended(), log_path=str(old.log_path)))
    with registry.reserve("train") as first:
        first.log_path.write_text("so far")
        first.register(_record(tmp_path, _ended(), log_path=str(first.log_path), dumped=True))
    with sleeper() as child:
        _register(registry, "other", child.id, tmp_path, log_path=str(first.log_path))
        registry.forget("train")
        assert registry.look("train") is None
        assert list(first.log_path.parent.iterdir()) == [first.log_path]
        assert first.log_path.read_text() == "so far"
        with registry.reserve("train") as again:
            assert again.log_path != first.log_path
    registry.forget("other")
    assert os.listdir(tmp_path / "state" / "jobs") == [], "nobody's log any more"


def test_forgetting_a_dumped_job_keeps_its_log_unless_asked(registry: Registry, tmp_path: Path) -> None:
    for force in (False, True):
        with registry.reserve("train") as job:
            job.log_path.write_text("so far")
            job.register(_record(tmp_path, _ended(), log_path=str(job.log_path), snapshot="/s", dumped=True))
        assert registry.forget("train", force=force).state.word == "dumped"
        assert job.log_path.exists() is not force
    assert os.listdir(tmp_path / "state" / "jobs") == []


def test_a_kept_log_in_another_jobs_folder_is_removed_with_that_job(registry: Registry, tmp_path: Path) -> None:
    with registry.reserve("train") as first:
        first.log_path.write_text("so far")
        first.register(_record(tmp_path, _ended(), log_path=str(first.log_path)))
    _register(registry, "other", _ended(), tmp_path, log_path=str(first.log_path))
    registry.forget("other")
    assert first.log_path.exists()
    registry.forget("train")
    assert not first.log_path.parent.exists()


def test_a_record_is_updated_only_for_its_own_job(registry: Registry, tmp_path: Path) -> None:
    with sleeper() as child, sleeper() as other:
        record = _register(registry, "train", child.id, tmp_path)
        registry.update(record, snapshot="/snap")
        assert registry.find("train").record == replace(record, snapshot="/snap")
        registry.update(replace(record, root=other.id), snapshot="/wrong")
        assert registry.find("train").record == replace(record, snapshot="/snap")


def _write_damage(folder: Path, damage: str) -> None:
    path = folder / "record.json"
    data = path.read_bytes()
    path.unlink()
    if damage == "a link":
        path.symlink_to("/dev/zero")
    elif damage == "a pipe":
        os.mkfifo(path)
    elif damage == "too large":
        path.write_bytes(b" " * (records.MAX_RECORD_BYTES + 1))
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "half" else data.replace(b'"train"', b'"other"'))


@pytest.mark.parametrize("damage", ["half", "another name", "too large", "a link", "a pipe"])
def test_a_damaged_record_hides_no_other_and_can_be_forgotten(damage: str, registry: Registry, tmp_path: Path) -> None:
    with sleeper() as child:
        _register(registry, "train", _ended(), tmp_path)
        _register(registry, "serve", child.id, tmp_path)
        _write_damage(tmp_path / "state" / "jobs" / "train", damage)
        assert {job.name: job.state.word for job in registry.jobs()} == {"serve": "running", "train": "damaged"}
        with pytest.raises(InvalidRequest, match="damaged"):
            _register(registry, "train", child.id, tmp_path)
        log = tmp_path / "state" / "jobs" / "train" / "20260102-030405.log"
        log.write_text("its job may run")
        registry.forget("train")
        assert [job.name for job in registry.jobs()] == ["serve"]
        assert list(log.parent.iterdir()) == [log]
        _register(registry, "train", child.id, tmp_path)


# --- several gpucr at once -------------------------------------------------------------------------------------

START = """
import signal, sys
from pathlib import Path
from gpucr.jobs.registry import Registry
with Registry(Path(sys.argv[1])).reserve("train") as reservation:
    reservation.log_path.write_text("begun")
    print("reserved", flush=True)
    signal.pause()
"""


@contextlib.contextmanager
def _starting(folder: Path) -> Any:
    """Another gpucr, in the middle of starting the job `train`."""
    with subprocess.Popen([sys.executable, "-c", START, folder], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "reserved\n"
            yield other
        finally:
            other.kill()


def test_a_name_can_be_reserved_only_once(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registries, "LOCK_TIMEOUT_S", 0.05)
    with _starting(tmp_path / "state" / "jobs"):
        with pytest.raises(Unsupported, match="another gpucr is at work on the job train"):
            _register(registry, "train", _ended(), tmp_path)
        assert registry.jobs() == (), "what is not started yet is no job"
        with registry.reserve("serve"):
            pass


def test_a_gpucr_killed_during_a_start_leaves_the_name_free(registry: Registry, tmp_path: Path) -> None:
    with _starting(tmp_path / "state" / "jobs") as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert registry.jobs() == ()
        record = _register(registry, "train", identity(os.getpid()), tmp_path)
        assert registry.find("train").record == record


def test_a_gpucr_killed_while_writing_leaves_the_old_record(registry: Registry, tmp_path: Path) -> None:
    record = _register(registry, "train", identity(os.getpid()), tmp_path)
    (tmp_path / "state" / "jobs" / "train" / "record.json.new").write_bytes(encode(record)[:40])
    assert registry.find("train").record == record
    registry.update(record, snapshot="/snap")
    assert registry.find("train").record == replace(record, snapshot="/snap")


RACE = """
import os, sys
from pathlib import Path
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registry import Registry
from gpucr.linux.processes import describe
input()
me = describe(os.getpid()).id
registry = Registry(Path(sys.argv[1]))
for _ in range(5):
    with registry.reserve_numbered("train") as reservation:
        print(reservation.name, flush=True)
        reservation.register(
            JobRecord("x", ("x",), "/", {}, False, "host", False, "", me, me, str(reservation.log_path), "")
        )
"""


def test_concurrent_starts_get_different_names(registry: Registry, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "jobs"
    start: Callable[[], subprocess.Popen[str]] = lambda: subprocess.Popen(  # noqa: E731
        [sys.executable, "-c", RACE, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    racers = [start() for _ in range(3)]
    said = [racer.communicate("go\n", timeout=30)[0].split() for racer in racers]
    names = [name for each in said for name in each]
    assert len(set(names)) == len(names) == 15
    assert {job.name for job in registry.jobs()} == set(names)


def test_a_start_is_not_cleared_away_by_who_waited_for_the_lock_of_a_removed_folder(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One removes a killed gpucr's folder, another one begins a start there, and a third has the old lock."""
    folder, real = tmp_path / "state" / "jobs" / "train-1", locks.lock
    with registry.reserve("other"):
        pass
    folder.mkdir(mode=0o700)
    with contextlib.ExitStack() as start:

        def removed_and_made_again(fd: int, **options: Any) -> None:
            monkeypatch.setattr(locks, "lock", real)
            shutil.rmtree(folder)
            start.enter_context(registry._locked("train-1"))
            real(fd, **options)

        monkeypatch.setattr(locks, "lock", removed_and_made_again)
        registry._remove_unregistered()
        assert (folder / "lock").exists(), "the start has lost its folder"


def _during_the_removal(monkeypatch: pytest.MonkeyPatch, begin: Callable[[], object]) -> None:
    """Call ``begin`` when the first folder is about to go, whose files have gone."""
    real = os.rmdir

    def rmdir(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(os, "rmdir", real)
        begin()
        real(*arguments, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)


def test_a_start_is_not_cleared_away_with_the_folder_that_it_found(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One removes a killed gpucr's folder, another one begins a start there once the lock has gone."""
    folder = tmp_path / "state" / "jobs" / "train-1"
    with registry.reserve("other"):
        pass
    folder.mkdir(mode=0o700)
    with contextlib.ExitStack() as start:
        _during_the_removal(monkeypatch, lambda: start.enter_context(registry._locked("train-1")))
        registry._remove_unregistered()
        assert (folder / "lock").exists(), "the start has lost its folder"
    registry._remove_unregistered()
    assert os.listdir(folder.parent) == []


def test_leftovers_of_a_killed_removal_are_removed(registry: Registry, tmp_path: Path) -> None:
    left = tmp_path / "state" / "jobs" / ".removed-7"
    (left / "in").mkdir(parents=True, mode=0o700)
    assert registry.jobs() == ()
    with registry.reserve("other"):
        assert not left.exists()
