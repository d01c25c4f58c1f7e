"""The gate on aarch64, under qemu-user. The longjmp cases are only for x86-64: see native/jumps.c."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpucr.interposer.build import compile_library
from gpucr.interposer.client import Agent
from tests.interposer.conftest import NATIVE, Start

COMPILER, EMULATOR, PREFIX = "aarch64-linux-gnu-gcc", "qemu-aarch64", "/usr/aarch64-linux-gnu"

pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER} and {EMULATOR}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("aarch64")
    compile_library(made, compiler=COMPILER)
    common = [COMPILER, "-D_GNU_SOURCE", "-O1", "-fexceptions"]
    driver = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(made / "libcuda.so.1")]
    subprocess.run([*common, *driver, str(NATIVE / "fake_driver.c")], check=True, timeout=60)
    program = ["-o", str(made / "gate_cases"), str(NATIVE / "gate_cases.c"), "-pthread", "-ldl"]
    subprocess.run([*common, *program], check=True, timeout=60)
    return made


def begin(start: Start, folder: Path, case: str) -> subprocess.Popen[str]:
    inner = ["-E", f"LD_PRELOAD={folder}/libgpucr-interposer.so", "-E", f"LD_LIBRARY_PATH={folder}"]
    return start(EMULATOR, "-L", PREFIX, *inner, str(folder / "gate_cases"), case, LD_PRELOAD="")


@pytest.mark.parametrize("case", ["pthread-exit", "raw-exit", "cancel", "failed-capture"])
def test_a_call_left_abnormally_does_not_count(start: Start, folder: Path, case: str) -> None:
    process = begin(start, folder, case)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    with Agent(process.pid) as agent:
        assert agent.close_gate(10).is_empty


def test_arguments_and_frames_are_kept_and_no_code_is_writable(start: Start, folder: Path) -> None:
    process = begin(start, folder, "arguments")
    assert process.stdout is not None
    weighted = sum(i * i for i in range(1, 17)) + 50 + 250
    lines = [process.stdout.readline().strip() for _ in range(4)]
    assert lines == [f"sum {weighted}", f"struct 7 {3 * 64}", "frames enough", "rwx 0"]
