"""Device memory that the driver hands over goes through a disk where host memory has no room for a copy."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import gpucr
from gpucr.diagnosis import preflight
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import CustomStorageError, Unsupported
from gpucr.gpu_state.custom_storage import carrier, spool
from gpucr.gpu_state.custom_storage.spool import Spool, SpoolFile
from gpucr.linux import libc, memory, own_python
from gpucr.model import CudaState
from gpucr.quantities import format_bytes
from tests.counter import Counter, CounterFactory
from tests.memory_cgroup import ENTER, limited
from tests.storm import later, long

MIB = 1 << 20

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("sim_only")]


@pytest.fixture(autouse=True)
def driver_615(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCR_SIM_DRIVER", "615")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files, on a disk."""
    if memory.lies_in_memory(tmp_path):
        pytest.skip("files on a disk are tried: give pytest a --basetemp there")
    folder = tmp_path / "temporary"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """For copies of device memory: what is counted before them."""
    monkeypatch.setattr(memory, "available_bytes", lambda pid=None: 0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    """The files that are made from now on: in which folder, and of what size."""
    seen: list[tuple[Path, int]] = []
    real = Spool.file

    def making(self: Spool, size_bytes: int) -> SpoolFile:
        seen.append((self.folder, size_bytes))
        return real(self, size_bytes)

    monkeypatch.setattr(Spool, "file", making)
    return seen


@pytest.fixture
def job(counter: CounterFactory) -> Counter:
    return counter("--mib", "9", "--devices", "0,1", "--fork", "1")


def assert_runs(job: Counter, driver: CudaDriver, pids: list[int], expected: int) -> None:
    assert job.processes() == pids
    assert {driver.state(pid) for pid in pids} == {CudaState.RUNNING}
    assert job.ask() == expected
    assert job.send("verify") == "ok"


# --- where it goes -----------------------------------------------------------------------------------------------


def test_a_file_has_no_name_and_its_space_is_reserved(disk: Path) -> None:
    file = Spool.find(8 * MIB).file(8 * MIB)
    status = os.fstat(file.fd)
    assert (status.st_nlink, status.st_mode & 0o777, status.st_size) == (0, 0o600, 8 * MIB)
    assert status.st_blocks * 512 >= 8 * MIB
    assert not list(disk.iterdir())
    file.resize(MIB)
    assert os.fstat(file.fd).st_blocks * 512 < 8 * MIB
    file.close()
    file.close()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR])
def test_a_file_system_without_unnamed_files(number: int, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def opening(path: object, flags: int, *arguments: object, **options: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", True, raising=False)  # it remembers that it does not
    file = Spool.find(MIB).file(MIB)
    status = os.fstat(file.fd)
    assert (status.st_nlink, status.st_mode & 0o777, status.st_size) == (0, 0o600, MIB)
    assert not list(disk.iterdir())
    file.close()


def test_a_file_system_that_reserves_nothing(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> Callable[..., int]:
        monkeypatch.setattr(libc, "last_error", lambda what: OSError(number, os.strerror(number)))
        return lambda *_: -1

    monkeypatch.setattr(spool, "_fallocate", refuse(errno.EOPNOTSUPP))
    file = Spool.find(MIB).file(MIB)
    assert os.fstat(file.fd).st_size == MIB
    file.close()
    monkeypatch.setattr(spool, "_fallocate", refuse(errno.ENOSPC))
    with pytest.raises(CustomStorageError, match=r"1\.0 MiB of device memory cannot be put into .*No space") as raised:
        Spool.find(MIB).file(MIB)
    assert raised.value.code == "GPUCR-NO-SPACE"


def test_a_memory_backed_folder_is_not_a_disk(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory = Path("/dev/shm")
    if not memory.lies_in_memory(in_memory):
        pytest.skip("/dev/shm is on a disk here")
    monkeypatch.setenv("TMPDIR", str(in_memory))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert Spool.find(MIB).why_not == "/dev/shm lies in memory"
    monkeypatch.delenv("TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", str(in_memory))
    monkeypatch.setattr(spool, "_ON_DISK", disk)
    found = Spool.find(MIB)
    assert (found.folder, found.why_not) == (disk, None)


def test_a_disk_too_small_or_writable_by_others(disk: Path) -> None:
    assert "free" in (Spool.find(1 << 60).why_not or "")
    disk.chmod(0o777)
    assert "every user (mode 0777) can change" in (Spool.find(MIB).why_not or "")
    disk.rmdir()
    assert Spool.find(MIB).why_not == f"{disk} cannot be used: No such file or directory"


# --- dump and freeze ---------------------------------------------------------------------------------------------


@pytest.mark.criu
@pytest.mark.usefixtures("no_host_memory")
@pytest.mark.parametrize("persist", ["ended", later("sync"), later("background")])
def test_a_dump_into_a_store(
    persist: str, job: Counter, driver: CudaDriver, tmp_path: Path, disk: Path, made: list[tuple[Path, int]]
) -> None:
    """Also one that leaves the job running: it comes back from the file, which is saved meanwhile."""
    pids = job.processes()
    gpucr.init_store(tmp_path / "store")
    options = {} if persist == "ended" else {"leave_running": True, "persist": persist}
    report = gpucr.dump(job.pid, f"{tmp_path / 'store'}#s", **options)  # type: ignore[arg-type]
    assert [folder for folder, _ in made] == [disk] * len(pids)
    assert any(f"go through an unencrypted file in {disk}" in warning for warning in report.warnings)
    allocated = next(phase for phase in report.phases if phase.name == "allocate")
    assert allocated.size_bytes == 0, "what is on a disk is not in host memory"
    if persist != "ended":
        assert_runs(job, driver, pids, 101)
        job.kill()
    job.reap()
    gpucr.restore(report.snapshot.where)
    assert_runs(job, driver, pids, 101)
    assert not list(disk.iterdir())


@pytest.mark.criu
def test_a_dump_that_fits_in_host_memory_uses_no_disk(
    job: Counter, tmp_path: Path, disk: Path, made: list[tuple[Path, int]]
) -> None:
    gpucr.init_store(tmp_path / "store")
    report = gpucr.dump(job.pid, f"{tmp_path / 'store'}#s", leave_running=True)
    assert not made
    assert not any("unencrypted" in warning for warning in report.warnings)
    allocated = next(phase for phase in report.phases if phase.name == "allocate")
    assert allocated.size_bytes >= 2 * 9 * MIB


@pytest.mark.criu
@pytest.mark.usefixtures("no_host_memory")
def test_a_dump_without_a_copy_uses_no_disk(
    job: Counter, driver: CudaDriver, tmp_path: Path, disk: Path, made: list[tuple[Path, int]]
) -> None:
    """A dump into a folder goes there; a suspended process keeps its memory itself."""
    report = gpucr.dump(job.pid, tmp_path / "s", leave_running=True, persist="sync")
    assert next(phase for phase in report.phases if phase.name == "allocate").size_bytes == 0
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid)
    assert_runs(job, driver, job.processes(), 101)
    assert not made


@pytest.mark.criu
@pytest.mark.usefixtures("no_host_memory")
def test_a_frozen_job(
    job: Counter, driver: CudaDriver, tmp_path: Path, disk: Path, made: list[tuple[Path, int]]
) -> None:
    pids = job.processes()
    gpucr.init_store(tmp_path / "store")
    with gpucr.freeze(job.pid) as frozen:
        assert len(made) == len(pids)
        assert any("unencrypted" in warning for warning in frozen.warnings)
        saved = [frozen.save(to).snapshot.where for to in (f"{tmp_path / 'store'}#a", tmp_path / "b")]
    assert_runs(job, driver, pids, 101)
    for where in saved:
        job.kill()
        job.reap()
        gpucr.restore(where)
        assert_runs(job, driver, pids, 101)


@long
@pytest.mark.criu
def test_a_cgroup_smaller_than_the_device_memory(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, disk: Path
) -> None:
    """For real: gpucr and its carrier are in it. The job is outside, since its GPU is host memory."""
    job = counter("--mib", "768")
    gpucr.init_store(tmp_path / "store")
    code = "import gpucr, sys; print(*gpucr.dump(int(sys.argv[1]), sys.argv[2], gpu_state=sys.argv[3]).warnings)"
    with limited(720 << 20) as (folder, _):
        enter = ENTER.format(folder=str(folder))

        def run(gpu_state: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-c", enter + code, str(job.pid), f"{tmp_path / 'store'}#s", gpu_state],
                check=False, capture_output=True, text=True,
            )  # fmt: skip

        assert "the kernel would kill processes of the cgroup" in run("captured").stderr
        done = run("custom")
    assert done.returncode == 0, done.stderr
    assert f"go through an unencrypted file in {disk}" in done.stdout
    job.reap()
    gpucr.restore(f"{tmp_path / 'store'}#s")
    assert_runs(job, driver, [job.pid], 101)


# --- what fails --------------------------------------------------------------------------------------------------


@pytest.mark.criu
@pytest.mark.usefixtures("no_host_memory")
def test_without_memory_and_disk_nothing_starts(
    job: Counter, driver: CudaDriver, tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpucr.init_store(tmp_path / "store")
    monkeypatch.setattr(spool, "_MARGIN_BYTES", 1 << 60)
    for attempt in (lambda: gpucr.dump(job.pid, tmp_path / "store"), lambda: gpucr.freeze(job.pid)):
        with pytest.raises(Unsupported, match="neither host memory nor a disk has room for") as raised:
            attempt()
        assert raised.value.code == "GPUCR-HOST-MEMORY"
        assert str(disk) in raised.value.message
        assert "TMPDIR" in (raised.value.hint or "")
    assert_runs(job, driver, job.processes(), 101)


@pytest.mark.usefixtures("no_host_memory")
def test_a_dry_run_reports_the_disk(job: Counter, tmp_path: Path, disk: Path) -> None:
    gpucr.init_store(tmp_path / "store")
    plan = gpucr.plan_dump(job.pid, tmp_path / "store")
    assert any(step.startswith("allocate 0") and str(disk) in step for step in plan.steps), plan.steps
    assert any(f"device memory to a disk ({disk}), GPUs released" in step for step in plan.steps), plan.steps
    into_folder = gpucr.plan_dump(job.pid, tmp_path / "s").steps
    assert any("device memory to the snapshot, GPUs released" in step for step in into_folder), into_folder
    found = [finding for finding in plan.findings if str(disk) in finding.what]
    assert [finding.severity for finding in found] == ["warning"]


@pytest.mark.criu
@pytest.mark.usefixtures("no_host_memory", "disk")
def test_a_disk_that_filled_meanwhile_leaves_the_job_running(
    job: Counter, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The space is reserved before anything stops."""
    pids = job.processes()
    gpucr.init_store(tmp_path / "store")

    def full(self: SpoolFile, size_bytes: int) -> None:
        assert {driver.state(pid) for pid in pids} == {CudaState.RUNNING}
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SpoolFile, "resize", full)
    with pytest.raises(CustomStorageError, match="No space left") as raised:
        gpucr.dump(job.pid, tmp_path / "store")
    assert raised.value.code == "GPUCR-NO-SPACE"
    assert_runs(job, driver, pids, 101)


@pytest.mark.criu
@pytest.mark.usefixtures("no_host_memory", "disk")
@pytest.mark.parametrize("into", ["folder", "store"])
def test_without_a_carrier_there_is_no_memory_for_staging(
    into: str, job: Counter, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way to staging is open only where host memory has room for it."""
    if into == "store":
        gpucr.init_store(tmp_path / "to")
    real = own_python.command

    def command_of(module: str, *arguments: object) -> list[str]:
        return ["/bin/false"] if module == carrier.__name__ else real(module, *arguments)

    monkeypatch.setattr(own_python, "command", command_of)
    with pytest.raises(CustomStorageError, match="has ended"):
        gpucr.dump(job.pid, tmp_path / "to")
    assert_runs(job, driver, job.processes(), 101)


def test_one_disk_for_both_is_reported(disk: Path, tmp_path: Path) -> None:
    size_bytes = memory.free_disk_bytes(disk) // 4
    assert [each.what for each in preflight.check_spool(disk, size_bytes, None, tmp_path)] == [
        f"{format_bytes(size_bytes)} of device memory go through an unencrypted file in {disk}"
    ]
    found = preflight.check_spool(disk, 3 * size_bytes, None, tmp_path)
    assert [each.severity for each in found] == ["warning", "warning"]
    assert found[1].what == f"{disk} and {tmp_path} are on one disk"
    assert found[1].code == "GPUCR-NO-SPACE"
