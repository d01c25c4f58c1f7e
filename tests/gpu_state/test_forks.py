"""A CUDA process forks while it is suspended, or being suspended: its CPU threads continue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.gpu_state.staging.attach import traced
from gpucr.linux import capabilities, processes
from gpucr.linux.descriptors import send_descriptor
from gpucr.linux.tmpfs import FILE_NAME, StagingFile
from tests import command
from tests.conftest import skip_or_fail
from tests.counter import wait_until

PROGRAM = """
import ctypes, os, signal, sys
size_bytes = 16 << 20
cuda = ctypes.CDLL("libcuda.so.1")
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(size_bytes)) == 0
content, copy = os.urandom(size_bytes), ctypes.create_string_buffer(size_bytes)
assert cuda.cuMemcpyHtoD_v2(memory, content, ctypes.c_size_t(size_bytes)) == 0
print("ready", flush=True)
for line in sys.stdin:
    if line == "fork\\n":
        child = os.fork()
        if child == 0:
            signal.pause()
        print(child, flush=True)
    else:
        assert cuda.cuMemcpyDtoH_v2(copy, memory, ctypes.c_size_t(size_bytes)) == 0
        print(copy.raw == content, flush=True)
"""


class Forking:
    """A program with CUDA that forks when it is told to."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, what: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        with self.process:
            pass


@pytest.fixture
def start() -> Iterator[Callable[..., Forking]]:
    if not capabilities.can_checkpoint_processes():
        skip_or_fail("root", "staging files and dumps need root")
    started: list[Forking] = []

    def begin(environment: dict[str, str] | None = None) -> Forking:
        started.append(Forking(environment or {}))
        return started[-1]

    yield begin
    for each in started:
        each.close()


def has_staging(pid: int) -> bool:
    """Whether the process has a staging file open or mapped."""
    opened = any(FILE_NAME in file.target for file in processes.open_files(pid))
    return opened or FILE_NAME in Path(f"/proc/{pid}/maps").read_text()


def assert_can_be_dumped(job: Forking, to: Path) -> None:
    gpucr.dump(job.pid, to, leave_running=True, force=True)  # its pipes lead to this test
    assert job.tell("check") == "True"


@pytest.mark.criu
def test_a_child_of_a_suspended_process_does_not_keep_its_staging(
    start: Callable[..., Forking], tmp_path: Path
) -> None:
    job = start()
    gpucr.suspend(job.pid)
    child = int(job.tell("fork"))
    assert has_staging(job.pid)
    assert not has_staging(child)
    gpucr.resume(job.pid)
    assert job.tell("check") == "True"
    assert_can_be_dumped(job, tmp_path / "s")


def test_a_child_forked_during_the_checkpoint_does_not_keep_the_file(
    start: Callable[..., Forking], sim_environment: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    """It does keep its parent's other open files, also those of the driver: see docs/adr/0042."""
    job = start(sim_environment(faults=f"checkpoint=until:{tmp_path / 'go'}"))
    suspending = command.start("suspend", job.pid)
    wait_until(lambda: has_staging(job.pid), "the process to have the staging file open")
    child = int(job.tell("fork"))
    had_it = has_staging(child)
    (tmp_path / "go").touch()
    said = suspending.communicate(timeout=command.TIMEOUT_S)
    assert suspending.returncode == 0, said
    assert had_it
    assert not has_staging(child)
    gpucr.resume(job.pid)
    assert job.tell("check") == "True"


@pytest.mark.criu
def test_a_child_with_the_file_still_open_releases_it_at_the_next_dump(
    start: Callable[..., Forking], tmp_path: Path
) -> None:
    """As left by a gpucr that was killed in a checkpoint during which the process forked."""
    job = start()
    child = int(job.tell("fork"))
    with StagingFile.create(1 << 20) as file, traced(child) as thread:
        send_descriptor(thread, file.fd)
    assert has_staging(child)
    assert_can_be_dumped(job, tmp_path / "s")
    assert not has_staging(child)
