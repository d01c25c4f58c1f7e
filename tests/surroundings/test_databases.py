"""SQLite in a restored job: it continues with the current database, and no rewind breaks it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

import gpucr
from gpucr.errors import Unsupported
from gpucr.linux import sparse
from gpucr.records import RecordError
from gpucr.snapshot import databases
from gpucr.snapshot.folder import Snapshot
from gpucr.snapshot.manifest import SavedDatabase
from tests.children import python
from tests.stepping import Job, StartJob
from tests.storm import later, sample

pytestmark = pytest.mark.criu

WORK = """
import sqlite3
database = sqlite3.connect("data.db", isolation_level=None)
database.execute("pragma journal_mode = {mode}")
database.execute("create table if not exists numbers (number integer primary key, filling text)")
log = open("log", "a")
done()
while True:
    step()
    try:
        for _ in range(40):
            database.execute("insert into numbers (filling) values (?)", ("x" * 2000,))
        print(turn, file=log, flush=True)
        check = database.execute("pragma integrity_check").fetchone()[0]
        done(f"{{check}} {{database.execute('select count(*) from numbers').fetchone()[0]}}")
    except sqlite3.Error as error:
        done(error)
"""
MODES = ("wal", "delete", "truncate", "persist")


def left_behind(start: StartJob, to: Path, mode: str) -> Job:
    """A job that was dumped with 40 rows, continued to 120, and was killed."""
    job = start(WORK.format(mode=mode))
    assert job.go_on() == "ok 40"
    report = gpucr.dump(job.pid, to, leave_running=True)
    assert any(f"the job has the SQLite database {job.folder}/data.db open" in each for each in report.warnings)
    assert [job.go_on(), job.go_on()] == ["ok 80", "ok 120"]
    job.kill()
    job.forget(after=1)
    return job


@pytest.mark.parametrize("mode", [MODES[0], *map(later, MODES[1:])])
def test_the_database_is_left_alone(start: StartJob, tmp_path: Path, mode: str) -> None:
    job = left_behind(start, tmp_path / "s", mode)
    report = gpucr.restore(tmp_path / "s")
    named = f"the SQLite database {job.folder}/data.db was changed after the dump"
    assert any(named in warning for warning in report.warnings)
    assert [job.go_on(), job.go_on()] == ["ok 160", "ok 200"]


@pytest.mark.parametrize("mode", [*map(later, MODES[:-1]), MODES[-1]])
def test_without_a_copy_a_rewind_is_refused_and_force_leaves_the_database_alone(
    start: StartJob, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "LIMIT_BYTES", 0)
    job = left_behind(start, tmp_path / "s", mode)
    with pytest.raises(Unsupported, match=r"data\.db was changed after the dump") as caught:
        gpucr.restore(tmp_path / "s", files="rewind")
    assert caught.value.code == "GPUCR-DATABASE"
    gpucr.restore(tmp_path / "s", files="rewind", force=True)
    assert (job.folder / "log").read_text() == "1\n"
    assert [job.go_on(), job.go_on()] == ["ok 160", "ok 200"]
    assert (job.folder / "log").read_text() == "1\n2\n3\n"


@pytest.mark.parametrize("mode", sample(MODES, 3))
def test_an_unchanged_database_is_no_obstacle(start: StartJob, tmp_path: Path, mode: str) -> None:
    job = start(WORK.format(mode=mode))
    assert job.go_on() == "ok 40"
    job.dump_and_end(tmp_path / "s")
    with (job.folder / "log").open("a") as log:
        log.write("another program's\n")
    report = gpucr.restore(tmp_path / "s", files="rewind")
    assert not any("SQLite" in warning for warning in report.warnings)
    assert job.go_on() == "ok 80"
    with contextlib.closing(sqlite3.connect(job.folder / "data.db")) as database:
        assert database.execute("select count(*) from numbers").fetchone() == (80,)


# --- a copy in the snapshot -------------------------------------------------------------------------------------------


def rows(path: Path) -> int:
    """How many there are; somebody looks into a database, and SQLite removes its -wal and -shm with the last look."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
        return int(database.execute("select count(*) from numbers").fetchone()[0])


def files_of(job: Job) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in job.folder.glob("data.db*")}


@pytest.mark.parametrize("place", ["s", "store#a"])
def test_a_database_opened_meanwhile(start: StartJob, tmp_path: Path, place: str) -> None:
    """The job's files of it are gone. All are put back together."""
    if "#" in place:
        gpucr.init_store(tmp_path / "store")
    job = start(WORK.format(mode="wal"))
    assert job.go_on() == "ok 40"
    report = job.dump_and_end(f"{tmp_path}/{place}")
    assert any("who opens it before the restore removes files of it" in each for each in report.warnings)
    before = files_of(job)
    assert sorted(before) == ["data.db", "data.db-shm", "data.db-wal"]
    assert rows(job.folder / "data.db") == 40
    assert sorted(files_of(job)) == ["data.db"]
    with pytest.raises(Unsupported, match=r"files of the SQLite database .*data\.db are missing") as caught:
        gpucr.restore(f"{tmp_path}/{place}")
    assert caught.value.code == "GPUCR-DATABASE"
    assert "--files rewind" in str(caught.value.hint)
    restored = gpucr.restore(f"{tmp_path}/{place}", files="rewind")
    assert any("data.db was put back as it was at the dump; kept beside it: " in each for each in restored.warnings)
    after = files_of(job)
    assert {name: after[name] for name in before} == before
    assert job.go_on() == "ok 80"
    (kept,) = job.folder.glob("data.db.gpucr-*")
    assert rows(kept) == 40


@pytest.mark.parametrize("mode", sample(MODES, 3))
def test_a_rewind_puts_the_database_back(start: StartJob, tmp_path: Path, mode: str) -> None:
    job = left_behind(start, tmp_path / "s", mode)
    gpucr.restore(tmp_path / "s", files="rewind")
    assert (job.folder / "log").read_text() == "1\n"
    assert [job.go_on(), job.go_on()] == ["ok 80", "ok 120"]
    kept = {path.name.partition(".gpucr-")[0] for path in job.folder.glob("data.db*.gpucr-*")}
    assert "data.db" in kept


def test_a_database_in_use_is_not_replaced(start: StartJob, tmp_path: Path) -> None:
    job = left_behind(start, tmp_path / "s", "wal")
    code = (
        "import sqlite3, sys, signal\nd = sqlite3.connect(sys.argv[1])\nd.execute('select count(*) from numbers')\n"
        "print('open', flush=True)\nsignal.pause()"
    )
    with python(code, job.folder / "data.db"), pytest.raises(Unsupported, match="is in use") as caught:
        gpucr.restore(tmp_path / "s", files="rewind")
    assert caught.value.code == "GPUCR-FILE-IN-USE"


@pytest.mark.parametrize("number", range(6))
def test_a_failure_at_any_rename_brings_everything_back(
    start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Two files are moved aside, two come in; the database is rewritten in its place. One more failure: none."""
    job = left_behind(start, tmp_path / "s", "wal")
    before = files_of(job)
    calls: list[str] = []
    real: Callable[..., None] = os.rename

    def rename(source: str, target: str, **folders: int) -> None:
        if "data.db" in str(source):
            calls.append(source)
            if len(calls) == number + 1:
                raise OSError(28, "No space left on device")
        real(source, target, **folders)

    monkeypatch.setattr(os, "rename", rename)
    if number < 4:
        with pytest.raises(Unsupported, match="cannot be put back: No space left on device"):
            gpucr.restore(tmp_path / "s", files="rewind")
        assert files_of(job) == before
        monkeypatch.undo()
        gpucr.restore(tmp_path / "s", files="rewind")
    else:
        gpucr.restore(tmp_path / "s", files="rewind")
        assert len(calls) == 4
    assert job.go_on() == "ok 80"


def test_a_copy_of_another_folders_file_is_damage(start: StartJob, tmp_path: Path) -> None:
    job = start(WORK.format(mode="wal"))
    job.go_on()
    job.dump_and_end(tmp_path / "s")
    (database,) = Snapshot.open(tmp_path / "s").manifest.databases
    assert database.path == str(job.folder / "data.db")
    first, *others = database.files
    for files in (others, [first, *others, replace(others[0], path="/etc/passwd")], [*database.files, first]):
        with pytest.raises(RecordError):
            SavedDatabase(database.path, tuple(files))


def test_a_database_that_was_half_put_back(start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpucr was killed: only a rewind completes it."""
    job = left_behind(start, tmp_path / "s", "delete")
    monkeypatch.setattr(databases.PutBackDatabase, "undo", lambda _: None)
    monkeypatch.setattr(databases.PutBackDatabase, "_rewrite", lambda *_: os.truncate(job.folder / "data.db", 4096))
    monkeypatch.setattr(os, "fsync", fail_for_folders)
    with pytest.raises(Unsupported, match="cannot be put back"):
        gpucr.restore(tmp_path / "s", files="rewind")
    monkeypatch.undo()
    (job.folder / f".data.db{databases._NEW}1").touch()
    with pytest.raises(Unsupported, match=r"files of the SQLite database .* are missing"):
        gpucr.restore(tmp_path / "s")
    gpucr.restore(tmp_path / "s", files="rewind")
    assert job.go_on() == "ok 80"
    assert not any(databases._NEW in path.name for path in job.folder.iterdir())


def fail_for_folders(fd: int) -> None:
    if os.path.isdir(f"/proc/self/fd/{fd}"):
        raise OSError(5, "Input/output error")


def test_a_database_that_changes_meanwhile_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program writes to it: its files would not belong together."""
    path = tmp_path / "data.db"
    path.write_bytes(b"SQLite format 3\0" + bytes(100))
    status = path.stat()
    members = {str(path): {str(path): (status.st_dev, status.st_ino)}}
    (tmp_path / "snapshot").mkdir()
    (saved,) = databases.save(members, tmp_path / "snapshot", 3)
    assert [file.stored for file in saved.files] == ["shared/3"]

    def copy(source: int, target: int, size_bytes: int) -> None:
        sparse.copy_data(source, target, size_bytes)
        with path.open("ab") as file:
            file.write(b"more")

    monkeypatch.setattr(databases, "copy_data", copy)
    assert databases.save(members, tmp_path / "snapshot", 4) == ()
    assert [each.name for each in (tmp_path / "snapshot" / "shared").iterdir()] == ["3"]
    path.rename(tmp_path / "moved")
    path.write_bytes(b"another")
    assert databases.save(members, tmp_path / "snapshot", 5) == ()
