"""Forked children of a CUDA process, which have its devices open, can be dumped. With real CRIU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gpucr
from gpucr.errors import Unsupported
from gpucr.jobs.selection import find_job
from gpucr.linux.processes import open_files
from tests.stepping import Job, StartJob

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("sim_only")]

FORKS = """
import ctypes, os
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, (name, result)
call("cuInit", 0)
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(8))
questions, answers = os.pipe(), os.pipe()
if os.fork() == 0:
    os.close(questions[1])
    while number := os.read(questions[0], 8):
        assert cuda.cuInit(0) == 3  # as ever in a child of fork: CUDA_ERROR_NOT_INITIALIZED
        os.write(answers[1], (int.from_bytes(number, "little") + 1).to_bytes(8, "little"))
    os._exit(0)
os.close(answers[1])
number = (0).to_bytes(8, "little")
call("cuMemcpyHtoD_v2", pointer, number, ctypes.c_size_t(8))
done()
while True:
    step()
    found = ctypes.create_string_buffer(8)
    call("cuMemcpyDtoH_v2", found, pointer, ctypes.c_size_t(8))
    os.write(questions[1], found.raw)
    number = os.read(answers[0], 8)
    call("cuMemcpyHtoD_v2", pointer, number, ctypes.c_size_t(8))
    done(int.from_bytes(number, "little"))
"""
"""A number in device memory, which a forked child increments at each step."""

DEVICE = "userfaultfd"
"""What stands for /dev/nvidia* on the simulator: a descriptor that CRIU refuses."""


def _devices(job: Job) -> dict[int, int]:
    """How many devices each process has open: the parent first."""
    return {pid: sum(DEVICE in file.target for file in open_files(pid)) for pid in sorted(job.pids())}


def test_a_child_releases_the_devices_for_a_dump_and_works_after_the_restore(start: StartJob, tmp_path: Path) -> None:
    job = start(FORKS)
    assert list(_devices(job).values()) == [1, 1]
    assert [job.go_on(), job.go_on()] == ["1", "2"]
    job.dump_and_end(tmp_path / "s")
    restored = gpucr.restore(tmp_path / "s")
    assert list(_devices(job).values()) == [1, 0]
    assert [job.go_on(), job.go_on()] == ["3", "4"]
    assert restored.pid == job.pid


def test_a_job_left_running_is_dumped_again(start: StartJob, tmp_path: Path) -> None:
    job = start(FORKS)
    said: list[gpucr.Progress] = []
    job.dump_and_end(tmp_path / "first", leave_running=True, on_progress=said.append)
    assert list(_devices(job).values()) == [1, 0]
    child = max(_devices(job))
    (note,) = [each.description for each in said if each.event == "note" and "forked with" in each.description]
    assert re.fullmatch(rf"process {child} \(\S+\) let go of the GPUs that it was forked with: 1 descriptors?", note)
    assert job.go_on() == "1"
    job.dump_and_end(tmp_path / "second")
    gpucr.restore(tmp_path / "second")
    assert job.go_on() == "2"


def test_a_suspend_makes_the_child_release_the_devices_too(start: StartJob, tmp_path: Path) -> None:
    job = start(FORKS)
    gpucr.suspend(job.pid)
    assert list(_devices(job).values()) == [0, 0]
    gpucr.resume(job.pid)
    assert job.go_on() == "1"
    job.dump_and_end(tmp_path / "s")
    gpucr.restore(tmp_path / "s")
    assert job.go_on() == "2"


def test_a_suspended_job_is_dumped_with_its_child(start: StartJob, tmp_path: Path) -> None:
    job = start(FORKS)
    gpucr.suspend(job.pid)
    job.dump_and_end(tmp_path / "s")
    gpucr.restore(tmp_path / "s")
    gpucr.resume(job.pid)
    assert [job.go_on(), job.go_on()] == ["1", "2"]


def test_after_a_checkpoint_by_another_tool_the_dump_is_refused(start: StartJob, tmp_path: Path) -> None:
    job = start(FORKS)
    driver = find_job(job.pid).driver
    assert driver is not None
    for action in (driver.lock, driver.checkpoint, driver.restore, driver.unlock):
        action(job.pid)
    with pytest.raises(Unsupported, match=r"has a descriptor or mapping that CRIU cannot dump"):
        gpucr.dump(job.pid, tmp_path / "s")
    assert job.go_on() == "1"
    assert list(_devices(job).values()) == [1, 1]
