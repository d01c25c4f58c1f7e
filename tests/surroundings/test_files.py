"""Jobs whose files have changed by the time of the restore: kept, cut back, refused. With real CRIU."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.snapshot.folder import Snapshot
from tests import command
from tests.stepping import StartJob

pytestmark = pytest.mark.criu

LOGS = """
append = open("append.log", "a", buffering=1)
plain = open("plain.log", "w", buffering=1)
with open("fixed.bin", "wb") as made:
    made.write(bytes(100))
fixed = open("fixed.bin", "r+b", buffering=0)
fixed.seek(40)
reader = open("plain.log")
def log(text):
    for file in (append, plain):
        print(text, file=file)
log("first")
assert reader.readline() == "first\\n"
done()
while True:
    step()
    log(f"turn {turn}")
    fixed.write(b"x")
    done(reader.readline().strip())
"""


def test_grown_files_are_kept_and_appended_to(start: StartJob, tmp_path: Path) -> None:
    job = start(LOGS)
    job.dump_and_end(tmp_path / "s", leave_running=True)
    assert job.go_on() == "turn 1"
    assert job.go_on() == "turn 2"
    job.kill()
    job.forget()
    report = gpucr.restore(tmp_path / "s")
    assert [phase.name for phase in report.phases] == ["verify", "keeper", "files", "criu", "keep"]
    assert sum("longer than at the dump" in warning for warning in report.warnings) == 2
    assert job.go_on() == "turn 1"
    for name in ("append.log", "plain.log"):
        assert (job.folder / name).read_text().split("\n") == ["first", "turn 1", "turn 2", "turn 1", ""], name
    assert (job.folder / "fixed.bin").read_bytes() == bytes(40) + b"xx" + bytes(58), "its position stays"
    assert not list(tmp_path.rglob(".gpucr-images-*"))


def test_grown_files_are_cut_back(start: StartJob, tmp_path: Path) -> None:
    job = start(LOGS)
    (job.folder / "plain.log").chmod(0o640)
    job.dump_and_end(tmp_path / "s", leave_running=True)
    assert job.go_on() == "turn 1"
    job.kill()
    job.forget()
    report = gpucr.restore(tmp_path / "s", files="rewind")
    assert job.go_on() == "turn 1"
    for name in ("append.log", "plain.log"):
        assert (job.folder / name).read_text() == "first\nturn 1\n", name
        (kept,) = job.folder.glob(f"{name}.gpucr-*")
        assert kept.read_text() == "turn 1\n"
        assert any(str(kept) in warning for warning in report.warnings)
    (kept,) = job.folder.glob("plain.log.gpucr-*")
    assert kept.stat().st_mode & 0o777 == 0o640


def test_a_cut_off_tail_is_put_back_when_the_restore_fails(
    start: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(LOGS)
    job.dump_and_end(tmp_path / "s", leave_running=True)
    assert job.go_on() == "turn 1"
    job.kill()

    def fail(*arguments: Any, **options: Any) -> int:
        assert (job.folder / "plain.log").read_text() == "first\n", "CRIU was to find it cut back"
        raise gpucr.CriuError("injected", phase="restore")

    monkeypatch.setattr("gpucr.criu.engine.Criu.restore", fail)
    with pytest.raises(gpucr.CriuError, match="injected"):
        gpucr.restore(tmp_path / "s", files="rewind")
    for name in ("append.log", "plain.log"):
        assert (job.folder / name).read_text() == "first\nturn 1\n", name
        assert not list(job.folder.glob(f"{name}.gpucr-*"))


def test_options_of_the_command(start: StartJob, tmp_path: Path) -> None:
    job = start(LOGS)
    job.dump_and_end(tmp_path / "s")
    with (job.folder / "append.log").open("a") as file:
        file.write("more\n")
    said = command.run_json("restore", tmp_path / "s", "--files", "rewind", "--tcp", "keep")
    (kept,) = job.folder.glob("append.log.gpucr-*")
    assert kept.read_text() == "more\n"
    assert any(str(kept) in warning for warning in said["warnings"])


def test_shorter_files(start: StartJob, tmp_path: Path) -> None:
    job = start(LOGS)
    job.dump_and_end(tmp_path / "s")
    job.forget()
    for name in ("append.log", "plain.log"):
        (job.folder / name).write_text("new\n")
    with pytest.raises(gpucr.Unsupported, match=r"2 bytes shorter than at the dump.*cannot be brought back"):
        gpucr.restore(tmp_path / "s", files="rewind")
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "turn 1", "the reader continues at the end as well"
    for name in ("append.log", "plain.log"):
        assert (job.folder / name).read_text() == "new\nturn 1\n", name


READER = """
import mmap
is_mapped = False
with open("data", "w") as made:
    made.write("one\\n" + "x" * 9000 + "\\n")
data = open("data")
mapped = mmap.mmap(data.fileno(), 0, prot=mmap.PROT_READ) if is_mapped else None
assert data.readline() == "one\\n"
done()
step()
done(data.readline().strip())
step()
"""


def test_a_changed_read_only_file_is_refused_without_force(start: StartJob, tmp_path: Path) -> None:
    job = start(READER)
    job.dump_and_end(tmp_path / "s")
    with (job.folder / "data").open("a") as data:
        data.write("more\n")
    with pytest.raises(gpucr.Unsupported, match=r"data is 5 bytes longer than at the dump.*the job only read it"):
        gpucr.restore(tmp_path / "s")
    gpucr.restore(tmp_path / "s", force=True)
    assert job.go_on() == "x" * 9000


def test_a_changed_mapped_file_is_refused_even_with_force(start: StartJob, tmp_path: Path) -> None:
    job = start(READER.replace("is_mapped = False", "is_mapped = True"))
    job.dump_and_end(tmp_path / "s")
    with (job.folder / "data").open("a") as data:
        data.write("more\n")
    with pytest.raises(gpucr.Unsupported, match="longer than at the dump"):
        gpucr.restore(tmp_path / "s")
    with pytest.raises(gpucr.CriuError, match=r"data has changed since the dump \(size\)"):
        gpucr.restore(tmp_path / "s", force=True)
    assert not job.pids()


def test_missing_files_are_reported_before_anything_starts(start: StartJob, tmp_path: Path) -> None:
    job = start("os.mkdir('data'); folder = os.open('data', os.O_RDONLY)\n" + LOGS)
    job.dump_and_end(tmp_path / "s")
    (job.folder / "data").rmdir()
    (job.folder / "plain.log").unlink()
    with pytest.raises(gpucr.Unsupported, match="2 files or folders of the job are missing") as refused:
        gpucr.restore(tmp_path / "s")
    assert str(job.folder / "data") in str(refused.value)
    assert str(job.folder / "plain.log") in str(refused.value)


def test_a_file_being_written_is_not_cut_back(start: StartJob, tmp_path: Path) -> None:
    job = start(LOGS)
    job.dump_and_end(tmp_path / "s")
    with (job.folder / "plain.log").open("a") as other, subprocess.Popen(["sleep", "60"], stdout=other) as writer:
        other.write("other\n")
        other.flush()
        with pytest.raises(gpucr.Unsupported, match=f"is in use.*by process {writer.pid}"):
            gpucr.restore(tmp_path / "s", files="rewind")
        writer.kill()


_LOCKS = {
    "flock": "fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "flock, shared": "fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)",
    "POSIX": "fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 8, 2)",
    "OFD": "fcntl.fcntl(f, 37, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 2, 8, 0))",
}


def _locking(how: str) -> str:
    return f"import fcntl, struct\nf = open('locked', 'a+')\n{_LOCKS[how]}\n"


@pytest.mark.parametrize("how", _LOCKS)
def test_a_lock_that_another_program_holds(start: StartJob, tmp_path: Path, how: str) -> None:
    job = start(_locking(how) + "done(); step()\ndone('restored')")
    job.dump_and_end(tmp_path / "s")
    locks = Snapshot.open(tmp_path / "s").manifest.locks
    assert [(lock.path, lock.is_write) for lock in locks] == [(str(job.folder / "locked"), how != "flock, shared")]
    other = _locking("flock" if how == "flock, shared" else how) + "print(flush=True)\nimport time\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", other], cwd=job.folder, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        begun = time.monotonic()
        with pytest.raises(gpucr.Unsupported, match=f"process {holder.pid} .*holds a lock on .*locked") as refused:
            gpucr.restore(tmp_path / "s")
        assert refused.value.code == "GPUCR-FILE-IN-USE"
        assert time.monotonic() - begun < 10
        holder.kill()
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "restored"


@pytest.mark.parametrize(
    ("how", "others"),
    [("flock", "POSIX"), ("flock, shared", "flock, shared"), ("POSIX", "fcntl.lockf(f, fcntl.LOCK_EX, 2, 0)")],
)
def test_a_lock_that_is_in_nobodys_way(start: StartJob, tmp_path: Path, how: str, others: str) -> None:
    job = start(_locking(how) + "done(); step()\ndone('restored')")
    job.dump_and_end(tmp_path / "s")
    with (job.folder / "locked").open("a+") as f:
        exec(_LOCKS.get(others, others), {"fcntl": fcntl, "f": f})  # noqa: S102
        gpucr.restore(tmp_path / "s")
    assert job.go_on() == "restored"


def test_a_changed_mode(start: StartJob, tmp_path: Path) -> None:
    """Of a file, and of a folder."""
    job = start("os.mkdir('in'); d = os.open('in', os.O_RDONLY)\nf = open('f', 'w')\ndone(); step(); done('restored')")
    job.dump_and_end(tmp_path / "s")
    for name in ("f", "in"):
        path = job.folder / name
        mode = path.stat().st_mode & 0o7777
        path.chmod(mode ^ 0o020)
        with pytest.raises(gpucr.Unsupported, match=f"{path} has another mode than at the dump") as refused:
            gpucr.restore(tmp_path / "s")
        assert refused.value.code == "GPUCR-FILE-CHANGED"
        assert f"chmod {mode:04o}" in str(refused.value.hint)
        path.chmod(mode)
    (job.folder / "in").rmdir()
    (job.folder / "in").write_bytes(b"")
    with pytest.raises(gpucr.Unsupported, match="is of another kind than at the dump"):
        gpucr.restore(tmp_path / "s")
    (job.folder / "in").unlink()
    (job.folder / "in").mkdir()
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "restored"


def test_a_file_system_that_is_read_only_now(start: StartJob, tmp_path: Path) -> None:
    job = start(
        """
import subprocess
os.mkdir("m")
subprocess.run(["mount", "-t", "tmpfs", "none", os.getcwd() + "/m"], check=True)
f, gone = open("m/f", "w"), open("m/gone", "w")
os.unlink("m/gone")
done(); step(); done("restored")
""",
    )
    job.dump_and_end(tmp_path / "s")
    mounted = job.folder / "m"
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    with pytest.raises(gpucr.Unsupported, match=f"no file can be made in {mounted} .*read-only") as refused:
        gpucr.restore(tmp_path / "s")
    assert f"{mounted}/f cannot be opened for writing (its file system is read-only)" in str(refused.value)
    assert refused.value.code == "GPUCR-NOT-PERMITTED"
    subprocess.run(["mount", "-o", "remount,rw", mounted], check=True)
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "restored"
    subprocess.run(["umount", "-l", mounted], check=True)


def test_unknown_modes(tmp_path: Path, start: StartJob) -> None:
    job = start("done(); step()")
    job.dump_and_end(tmp_path / "s")
    for wrong in ({"files": "truncate"}, {"tcp": "reset"}):
        with pytest.raises(gpucr.InvalidRequest) as refused:
            gpucr.restore(tmp_path / "s", **wrong)  # type: ignore[arg-type]
        assert "keep" in str(refused.value.hint)
