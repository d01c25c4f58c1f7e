"""gpucr's own use of a GPU is distinguished from that of other programs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpucr.driver import own_use
from gpucr.driver.gpus import list_gpus

pytestmark = pytest.mark.usefixtures("sim_only")

PROGRAM = """
import ctypes, sys
from gpucr.driver.cuda import load_driver
from gpucr.interposer.vault import Vault
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
def step(word):
    print(word, flush=True)
    sys.stdin.readline()
if sys.argv[1] == "CUDA first":
    cuda.cuInit(0)
elif sys.argv[1] == "a restore first":
    load_driver().ensure_initialized()
step("begun")
vault = Vault(sys.argv[2])
step("open")
vault.close()
step("closed")
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), vault.ordinal) == 0
step("own context")
"""
_MOMENTS = ("begun", "open", "closed", "own context")


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("the vault first", (False, True, True, False)),
        ("a restore first", (True, True, True, False)),
        ("CUDA first", (False, False, False, False)),
    ],
)
def test_a_process_using_cuda_only_for_gpucr_is_marked(order: str, expected: tuple[bool, ...]) -> None:
    command = [sys.executable, "-c", PROGRAM, order, list_gpus()[0].uuid]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for moment, is_gpucrs in zip(_MOMENTS, expected, strict=True):
            assert process.stdout.readline().strip() == moment
            assert own_use.is_gpucrs(process.pid, had_memory=True) == is_gpucrs, moment
            process.stdin.write("\n")
            process.stdin.flush()


HIDDEN = """
import os, sys
from gpucr.driver.cuda import load_driver
from gpucr.interposer.vault import Vault, Vaults
if sys.argv[1] == "a restore first":
    load_driver().ensure_initialized()
elif sys.argv[1] == "prepared first":
    Vaults().prepare()
for uuid in sys.argv[2:]:
    Vault(uuid).close()
print(os.environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.mark.parametrize("order", ["the vault first", "a restore first", "prepared first"])
def test_gpus_hidden_from_the_callers_programs_are_gpucrs_to_use(order: str) -> None:
    command = [sys.executable, "-c", HIDDEN, order, *(gpu.uuid for gpu in list_gpus())]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_an_ended_process_is_not_marked() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert not own_use.is_gpucrs(process.pid, had_memory=False)
