"""SQLite in a restored job: it continues with the current database, and no rewind breaks it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

import gpucr
from gpucr.errors import Unsupported
from tests.operations.stepping import Job, StartJob
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
def test_a_rewind_is_refused_and_force_leaves_the_database_alone(start: StartJob, tmp_path: Path, mode: str) -> None:
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
