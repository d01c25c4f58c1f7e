"""The simulated driver, machines of a test's own, and programs that run on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.libcuda import Libcuda, Machine, RunProgram

_PRELUDE = """
import ctypes, os, sys
cuda = ctypes.CDLL("libcuda.so.1")
u64, byref = ctypes.c_uint64, ctypes.byref
def allocate(size):
    pointer = u64()
    result = cuda.cuMemAlloc_v2(byref(pointer), ctypes.c_size_t(size))
    return result, pointer
def context(device=0):
    handle = ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(byref(handle), device) == 0
    assert cuda.cuCtxSetCurrent(handle) == 0
"""


@pytest.fixture
def libcuda(sim_only: None) -> Libcuda:
    """The simulated driver, called from the test's process, which never calls cuInit."""
    return Libcuda()


@pytest.fixture
def machine(sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Make this process and those that it starts see a machine of their own: ``machine("2x64MiB", name="b")``."""

    def become(gpus: str, name: str = "local") -> None:
        monkeypatch.setenv("GPUCR_SIM_GPUS", gpus)
        monkeypatch.setenv("GPUCR_SIM_MACHINE", name)
        monkeypatch.setenv("GPUCR_SIM_STATE", str(tmp_path / "state"))

    return become


@pytest.fixture
def run_program(sim_only: None) -> RunProgram:
    """Run a Python program on the simulated driver; the lines that it printed."""

    def run(source: str, **variables: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _PRELUDE + source],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run
