"""`gpucr.doctor` on a job: preflight's findings, with each condition made real, and nothing changed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import gpucr
from gpucr import CudaState, Finding, ProcessNotFound
from gpucr.checkups.job import check_deleted_files
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import InvalidRequest
from gpucr.linux import capabilities, processes
from gpucr.linux.memory import machine_available_bytes
from tests.checkups.judging import severities
from tests.children import python, sleeper, tracer_of, unused_pid
from tests.counter import DEADLINE_S, CounterFactory, wait_until

GIB = 1 << 30


def about(target: int, *subjects: str, to: Path | None = None) -> list[Finding]:
    """The doctor's findings about these parts of a job."""
    found = gpucr.doctor(target, to=to).checkups
    severities(found)
    assert {each.about for each in found} >= set(subjects)
    return [each for each in found if each.about in subjects]


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the tests can be in memory: Debian 13 has /tmp there."""
    monkeypatch.setattr("gpucr.linux.memory.lies_in_memory", lambda _folder: False)


@pytest.mark.usefixtures("on_disk")
def test_a_job_that_can_be_dumped(counter: CounterFactory, driver: CudaDriver, tmp_path: Path) -> None:
    program = counter("--mib", "1", "--fork", "1")
    found = about(
        program.pid, "job", "CUDA state", "tracers", "session", "open files", "host memory", "disk", to=tmp_path
    )
    assert {each.severity for each in found} == {"ok"}
    assert "processes: 2, with CUDA: 2" in found[0].evidence
    assert [driver.state(pid) for pid in program.processes()] == [CudaState.RUNNING] * 2
    assert program.ask() == 101


@pytest.mark.root
@pytest.mark.usefixtures("on_disk", "sim_only")
@pytest.mark.parametrize(("driver_version", "severity"), [("615", "ok"), ("580", "blocking")])
def test_memory_in_custom_storage_needs_no_host_memory(
    driver_version: str, severity: str, counter: CounterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCR_SIM_DRIVER", driver_version)
    program = counter("--mib", "1")
    available_bytes = machine_available_bytes()
    monkeypatch.setattr(
        "gpucr.checkups.job.device_bytes_in_use", lambda job, uses: {program.pid: {"GPU-0": 2 * available_bytes}}
    )
    found = gpucr.doctor(program.pid).checkups
    severities(found)
    assert [each.severity for each in found if each.about == "host memory"] == [severity]
    said = [each.what for each in found if each.about == "device memory"]
    assert said == (
        ["device memory of 1 process leaves by the driver's custom storage"] if driver_version == "615" else []
    )


def test_a_job_without_cuda() -> None:
    with sleeper() as child:
        (one,) = about(child.pid, "CUDA state")
    assert (one.severity, one.what) == ("ok", "no process uses CUDA")


def test_a_debugger() -> None:
    with sleeper() as child, tracer_of(child.pid) as tracer:
        (one,) = about(child.pid, "tracers")
    assert (one.severity, one.code, one.pid) == ("blocking", "GPUCR-TRACED", child.pid)
    assert f"TracerPid {tracer.pid}" in one.evidence


def test_a_descriptor_criu_cannot_dump() -> None:
    code = (
        "import ctypes, signal; libc = ctypes.CDLL(None)\n"
        "fd = libc.syscall(323, 1); assert fd >= 0\n"  # userfaultfd, UFFD_USER_MODE_ONLY
        "print('ready', flush=True); signal.pause()"
    )
    with python(code) as child:
        (one,) = about(child.pid, "open files")
    assert (one.severity, one.code) == ("blocking", "GPUCR-UNSUPPORTED-FILE")


def test_an_oversized_deleted_file(tmp_path: Path) -> None:
    """A sparse one, which takes no space."""
    code = (
        f"import os, signal; path = {str(tmp_path / 'big')!r}\n"
        "fd = os.open(path, os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 5 << 30); os.unlink(path)\n"
        "print('ready', flush=True); signal.pause()"
    )
    with python(code) as child:
        (one,) = about(child.pid, "open files")
    assert (one.severity, one.code) == ("blocking", "GPUCR-GHOST-TOO-LARGE")
    assert check_deleted_files({1: 4 * GIB - 1}) == []


def test_a_stopped_job(counter: CounterFactory) -> None:
    """The driver cannot be queried about it."""
    program = counter("--mib", "1")
    os.kill(program.pid, signal.SIGSTOP)
    processes.wait_for_stop([program.pid], DEADLINE_S)
    (one,) = gpucr.doctor(program.pid).checkups
    assert (one.severity, one.code) == ("blocking", "GPUCR-STOPPED")
    assert f"kill -CONT {program.pid}" in one.remedy


def test_too_little_host_memory(counter: CounterFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    program = counter("--mib", "8")
    monkeypatch.setattr("gpucr.linux.memory.machine_available_bytes", lambda: 1 << 20)
    found = about(program.pid, "host memory")
    assert (found[0].severity, found[0].code) == ("blocking", "GPUCR-HOST-MEMORY")


def test_too_little_disk(counter: CounterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = counter("--mib", "8")
    monkeypatch.setattr("gpucr.linux.memory.free_disk_bytes", lambda _folder: 1 << 20)
    (one, *_) = about(program.pid, "disk", to=tmp_path)
    assert (one.severity, one.code) == ("blocking", "GPUCR-NO-SPACE")


def test_a_suspended_job_and_room_to_resume(counter: CounterFactory, driver: CudaDriver) -> None:
    program = counter("--mib", "4")
    gpucr.suspend(program.pid)
    (one,) = about(program.pid, "GPU memory")
    assert one.severity == "ok"
    assert "a resume needs" in one.what
    assert driver.state(program.pid) is CudaState.CHECKPOINTED
    gpucr.resume(program.pid)
    wait_until(lambda: driver.state(program.pid) is CudaState.RUNNING, "the job to run")


@pytest.mark.usefixtures("on_disk")
def test_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    with sleeper() as child:
        (one,) = about(child.pid, "disk", to=tmp_path / "new" / "snapshot")
    assert str(tmp_path) in one.what
    assert list(tmp_path.iterdir()) == []


def test_missing_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCR_CRIU", "/nonexistent/criu")
    with sleeper() as child:
        (one, *_) = about(child.pid, "CRIU")
    assert one.severity == ("blocking" if capabilities.can_checkpoint_processes() else "warning")


def test_no_such_process() -> None:
    with pytest.raises(ProcessNotFound):
        gpucr.doctor(unused_pid())


def test_a_job_cannot_be_fixed() -> None:
    with sleeper() as child, pytest.raises(InvalidRequest, match="for the machine, not for a job"):
        gpucr.doctor(child.pid, fix=True)
