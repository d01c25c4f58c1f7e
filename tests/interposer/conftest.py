"""The interposer, a special driver for the gate's tests, and programs started with both."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.compiled import compiled_interposer

NATIVE = Path(__file__).parent / "native"
Start = Callable[..., "subprocess.Popen[str]"]


def _compile(output: Path, source: str, *flags: str, compiler: str = "cc") -> Path:
    subprocess.run(
        [compiler, "-O1", "-g", "-Wall", "-Werror", "-D_GNU_SOURCE", "-o", str(output), str(NATIVE / source), *flags],
        check=True,
        timeout=60,
    )
    return output


@pytest.fixture(scope="session")
def library() -> Path:
    """The interposer."""
    return compiled_interposer()


@pytest.fixture(scope="session")
def gate_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gate_cases, and beside it the libcuda.so.1 that it is for."""
    folder = tmp_path_factory.mktemp("gate")
    _compile(folder / "libcuda.so.1", "fake_driver.c", "-shared", "-fPIC", "-fexceptions", "-Wl,-soname,libcuda.so.1")
    if shutil.which("c++"):
        _compile(folder / "throws", "throws.cc", "-ldl", compiler="c++")
    return _compile(folder / "gate_cases", "gate_cases.c", "-pthread", "-ldl")


@pytest.fixture
def agents() -> Iterator[Path]:
    """The folder of the agents' sockets, which the first agent creates. The tests' own folders have too long names."""
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        yield Path(folder) / "a"


@pytest.fixture
def start(library: Path, agents: Path) -> Iterator[Start]:
    """Start programs under the interposer; those still running at the end are killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*command: str, inherit: bool = False, **environment: str) -> subprocess.Popen[str]:
        variables = {"LD_PRELOAD": str(library), "GPUCR_INTERPOSER_DIR": str(agents)}
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            close_fds=not inherit,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()
