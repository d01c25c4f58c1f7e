"""Where CRIU could not restore, as memory may not be writable and executable: a dump would end the job for nothing."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.linux import processor

pytestmark = pytest.mark.criu

_SET, _GET = 65, 66  # PR_SET_MDWE and PR_GET_MDWE: what SELinux does with execmem, for a process and its children
_CONFINED = f"""
import ctypes, os, sys
assert ctypes.CDLL(None).prctl({_SET}, 1, 0, 0, 0) == 0
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.fixture(autouse=True)
def _can_be_forbidden() -> None:
    if ctypes.CDLL(None).prctl(_GET, 0, 0, 0, 0) < 0:
        pytest.skip("this kernel cannot forbid a process such memory: Linux 6.3 can")


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    nothing = subprocess.DEVNULL
    with subprocess.Popen(
        ["sleep", "1000"], stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
    ) as process:
        yield process
        process.kill()


def _confined(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _CONFINED, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_dump_and_a_restore_are_refused_beforehand(job: subprocess.Popen[bytes], tmp_path: Path) -> None:
    gpucr.dump(job.pid, tmp_path / "snapshot", leave_running=True)
    dump = ("dump", job.pid, "--to", tmp_path / "other")
    for words in (dump, (*dump, "--dry-run")):
        _is_refused(_confined("-m", "gpucr", *words))
    assert not (tmp_path / "other").exists()
    assert job.poll() is None
    job.kill()
    job.wait()
    _is_refused(_confined("-m", "gpucr", "restore", tmp_path / "snapshot"))


def _is_refused(done: subprocess.CompletedProcess[str]) -> None:
    said = done.stdout + done.stderr
    assert done.returncode == 3, said
    assert "may not map memory that is both writable and executable" in said
    assert "GPUCR-NOT-PERMITTED" in said


def test_doctor_says_so() -> None:
    (line,) = [each for each in _confined("-m", "gpucr", "doctor").stdout.splitlines() if "executable" in each]
    assert line.startswith("blocking")


def test_the_processor_is_recorded_as_it_is() -> None:
    """Else its registers would be guessed, and a job be refused on the processor that it was dumped on."""
    seen = _confined("-c", "from gpucr.linux import processor; print(processor.here())")
    assert seen.stdout == f"{processor.here()}\n"
