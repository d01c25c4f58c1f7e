"""The name that a restored job gets, and the log that it continues with."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpucr.errors import InvalidRequest, Unsupported
from gpucr.jobs import registered
from gpucr.jobs import registry as registries
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registered import restored_name, restored_name_or_warning
from gpucr.model import JobFile, ProcessId
from gpucr.snapshot.folder import Snapshot
from tests.children import identity, sleeper, unused_pid
from tests.snapshot import samples

ME = identity(os.getpid())


@pytest.fixture(autouse=True)
def state(state_home: Path) -> Path:
    return state_home / "gpucr" / "jobs"


@pytest.fixture
def snapshot(tmp_path: Path, state: Path) -> Snapshot:
    """The snapshot of a job `trainer-1`, whose log was in the registry."""
    made = samples.manifest()
    assert made.launch is not None
    launch = replace(made.launch, log_path=str(state / "trainer-1" / "20260102-030405.log"))
    return dataclasses.replace(samples.committed(tmp_path / "snapshot"), manifest=replace(made, launch=launch))


def _look(name: str) -> JobRecord:
    record = registered.registry().find(name).record
    assert record is not None
    return record


def _register(name: str, root: ProcessId) -> None:
    with registered.registry().reserve(name) as reservation:
        reservation.register(
            JobRecord("x", ("x",), "/", {}, False, "host", False, "", root, root, str(reservation.log_path), "")
        )


def test_a_restored_job_keeps_its_name_and_log(snapshot: Snapshot) -> None:
    launch = snapshot.manifest.launch
    assert launch is not None
    with restored_name(snapshot) as name:
        assert name is not None
        assert name.log_path == Path(launch.log_path)
        assert name.log_path.read_bytes() == b"", "CRIU opens it by its name"
        assert registered.registry().jobs() == ()
        assert name.register_or_warn(ME, None, isolated=True, network="own", ends_with_caller=False) == ()
    record = _look("trainer-1")
    assert (record.root, record.keeper, record.isolated, record.network) == (ME, None, True, "own")
    assert (record.command, record.cwd, dict(record.environment)) == (launch.command, "/srv", dict(launch.environment))
    assert (record.snapshot, record.dumped) == (str(snapshot.path), False)


def test_an_existing_log_is_left_alone(snapshot: Snapshot) -> None:
    launch = snapshot.manifest.launch
    assert launch is not None
    log = Path(launch.log_path)
    log.parent.mkdir(parents=True)
    log.write_text("before")
    with restored_name(snapshot):
        pass
    assert log.read_text() == "before"


def test_a_clone_has_its_own_name_and_log(snapshot: Snapshot, state: Path) -> None:
    with sleeper() as one, sleeper() as two:
        for child, expected in ((one, "trainer-1-2"), (two, "trainer-1-3")):
            with restored_name(snapshot, clone=True) as name:
                assert name is not None
                assert (name.name, name.log_path.parent) == (expected, state / expected)
                name.register_or_warn(child.id, None, isolated=True, network="own", ends_with_caller=False)
        assert _look("trainer-1-2").log_path != _look("trainer-1-3").log_path


def test_the_user_names_a_clone(snapshot: Snapshot) -> None:
    with restored_name(snapshot, clone=True, name="copy") as name:
        assert name is not None
        name.register_or_warn(ME, None, isolated=True, network="own", ends_with_caller=False)
    with pytest.raises(InvalidRequest, match="its name is taken"), restored_name(snapshot, name="copy"):
        pass


@pytest.mark.parametrize("what", ["running", "dumped", "another one dumped", "gone", "damaged"])
def test_the_name_a_restored_job_takes(what: str, snapshot: Snapshot, state: Path) -> None:
    launch = snapshot.manifest.launch
    assert launch is not None
    _register("trainer-1", ME if what == "running" else ProcessId(unused_pid(), 1))
    if what == "dumped":
        registered.registry().update(_look("trainer-1"), dumped=True, log_path=launch.log_path)
    if what == "another one dumped":
        registered.registry().update(_look("trainer-1"), dumped=True)
    if what == "damaged":
        (state / "trainer-1" / "record.json").write_text("{")
    is_free = what in ("dumped", "gone")
    with restored_name(snapshot) as name:
        assert name is not None
        assert name.name == ("trainer-1" if is_free else "trainer-1-2")
    refused = contextlib.nullcontext() if is_free else pytest.raises(InvalidRequest, match="its name is taken")
    with refused, restored_name(snapshot, name="trainer-1"):
        pass
    with restored_name(snapshot, clone=True) as name:
        assert name is not None
        assert name.name == "trainer-1-2"


def test_a_part_takes_the_name_of_another_part_that_was_dumped_here(snapshot: Snapshot, state: Path) -> None:
    """Two nodes swap the parts of a job, which have one name. Both were dumped, and are restored together."""
    launch = snapshot.manifest.launch
    assert launch is not None
    there = replace(launch, log_path=str(state / "trainer-1" / "20260102-030406.log"))
    other = dataclasses.replace(snapshot, manifest=replace(snapshot.manifest, launch=there))
    _register("trainer-1", ProcessId(unused_pid(), 1))
    registered.registry().update(_look("trainer-1"), dumped=True, log_path=there.log_path)
    for parts, expected in (((), "trainer-1-2"), ((other,), "trainer-1")):
        with restored_name(snapshot, other_parts=parts) as name:
            assert name is not None
            assert name.name == expected
            assert name.log_path == Path(launch.log_path)


def test_jobs_with_the_same_user_log_are_distinguished_by_snapshot(snapshot: Snapshot, tmp_path: Path) -> None:
    launch = snapshot.manifest.launch
    assert launch is not None
    log = str(tmp_path / "log")
    snapshot = dataclasses.replace(snapshot, manifest=replace(snapshot.manifest, launch=replace(launch, log_path=log)))
    _register("trainer-1", ProcessId(unused_pid(), 1))
    for where, expected in (("/another", "trainer-1-2"), (snapshot.where, "trainer-1")):
        registered.registry().update(_look("trainer-1"), dumped=True, log_path=log, snapshot=where)
        with restored_name(snapshot) as name:
            assert name is not None
            assert name.name == expected


def test_a_restore_is_refused_while_another_job_has_the_name(
    snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registries, "LOCK_TIMEOUT_S", 0.1)
    with restored_name(snapshot), pytest.raises(Unsupported) as caught, contextlib.ExitStack() as opened:
        restored_name_or_warning(snapshot, opened)
    assert caught.value.code == "GPUCR-BUSY"


@pytest.mark.parametrize("is_open", [True, False])
def test_a_log_missing_at_the_dump_is_a_warning(is_open: bool, snapshot: Snapshot) -> None:
    launch = snapshot.manifest.launch
    assert launch is not None
    opened_files = (JobFile(launch.log_path, 5, is_written=True, is_mapped=False),) if is_open else ()
    snapshot = dataclasses.replace(snapshot, manifest=replace(snapshot.manifest, open_files=opened_files))
    for clone in (False, True):
        with contextlib.ExitStack() as opened:
            name, warnings = restored_name_or_warning(snapshot, opened, clone=clone)
            assert name is not None
            assert ["had been removed" in warning for warning in warnings] == [True] * (not is_open and not clone)


def test_a_failed_restore_changes_nothing(snapshot: Snapshot, state: Path) -> None:
    _register("trainer-1", ProcessId(unused_pid(), 1))
    before = (state / "trainer-1" / "record.json").read_bytes()
    with contextlib.suppress(ZeroDivisionError), restored_name(snapshot):
        raise ZeroDivisionError
    assert (state / "trainer-1" / "record.json").read_bytes() == before
    with contextlib.suppress(ZeroDivisionError), restored_name(snapshot, clone=True):
        raise ZeroDivisionError
    assert os.listdir(state) == ["trainer-1"]


def test_a_job_gpucr_did_not_start_has_no_name(snapshot: Snapshot) -> None:
    other = dataclasses.replace(snapshot, manifest=replace(snapshot.manifest, launch=None))
    with restored_name(other) as name:
        assert name is None
    with pytest.raises(InvalidRequest, match="cannot have a name"), restored_name(other, name="x"):
        pass


def test_an_impossible_name_is_a_warning(snapshot: Snapshot) -> None:
    """A manifest that somebody else wrote."""
    launch = snapshot.manifest.launch
    assert launch is not None
    odd = dataclasses.replace(snapshot, manifest=replace(snapshot.manifest, launch=replace(launch, name="../x")))
    with contextlib.ExitStack() as opened:
        name, warnings = restored_name_or_warning(odd, opened)
    assert name is None
    assert "cannot be the name of a job" in warnings[0]


def test_a_registry_that_cannot_be_written_is_a_warning(snapshot: Snapshot, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no folder")
    with contextlib.ExitStack() as opened:
        name, warnings = restored_name_or_warning(snapshot, opened)
    assert name is None
    assert "will not be in the registry" in warnings[0]


def test_a_job_is_found_by_its_pid_too() -> None:
    _register("mine", ME)
    assert registered.find_by_pid_or_name(os.getpid()).name == "mine"
    assert registered.find_by_pid_or_name("mine").name == "mine"
    for pid in (os.getppid(), unused_pid()):
        with pytest.raises(InvalidRequest, match="is not a job that gpucr started"):
            registered.find_by_pid_or_name(pid)


def test_resolving() -> None:
    _register("mine", ME)
    assert registered.resolve_pid("mine") == os.getpid()
    assert registered.resolve_pid(4711) == registered.resolve_pid("4711") == 4711
    registered.registry().update(_look("mine"), boot_id="another", host="node7")
    with pytest.raises(InvalidRequest, match="was started on node7"):
        registered.resolve_pid("mine")


def test_a_damaged_record_is_reported(state: Path) -> None:
    _register("mine", ME)
    (state / "mine" / "record.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="the record of the job mine is damaged: there is no `format_version`"):
        registered.resolve_pid("mine")


def test_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_knows() -> Path:
        raise FileNotFoundError("uid 7 has no home folder")

    monkeypatch.setattr(registered, "state_folder", nobody_knows)
    with pytest.raises(InvalidRequest, match="uid 7 has no home folder"):
        registered.resolve_pid("mine")
    assert registered.record_of(ME) is None, "a dump continues without it"
