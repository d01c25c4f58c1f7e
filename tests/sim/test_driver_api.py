"""The part of the driver API that programs call."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.counter import CounterFactory
from tests.sim.libcuda import Libcuda, Machine, RunProgram, gpu_uuids, used_bytes

CASES = {
    "count before cuInit": ("n = ctypes.c_int(); print(cuda.cuDeviceGetCount(byref(n)))", ["3"]),
    "cuInit with flags": ("print(cuda.cuInit(1))", ["1"]),
    "memory before a context": ("cuda.cuInit(0); print(allocate(1)[0])", ["201"]),
    "size zero": ("cuda.cuInit(0); context(); print(allocate(0)[0])", ["1"]),
    "no such device": ("cuda.cuInit(0); n = ctypes.c_int(); print(cuda.cuDeviceGet(byref(n), 2))", ["101"]),
    "texts": (
        "t = ctypes.c_char_p()\n"
        "for code in (0, 1, 304, 401, 600, 801):\n"
        "    cuda.cuGetErrorString(code, byref(t)); print(t.value.decode())\n"
        "cuda.cuGetErrorName(401, byref(t)); print(t.value.decode())\n"
        "print(cuda.cuGetErrorString(12345, byref(t)), t.value)",
        [
            "no error",
            "invalid argument",
            "OS call failed or operation not supported on this OS",
            "the operation cannot be performed in the present state",
            "device not ready",
            "operation not supported",
            "CUDA_ERROR_ILLEGAL_STATE",
            "1 None",
        ],
    ),
    "copies, fills and bounds": (
        "cuda.cuInit(0); context()\n"
        "_, a = allocate(1000); _, b = allocate(3_000_000)\n"
        "host = ctypes.create_string_buffer(1000)\n"
        "print(cuda.cuMemcpyHtoD_v2(a, b'x' * 1000, ctypes.c_size_t(1000)))\n"
        "print(cuda.cuMemsetD8_v2(b, 7, ctypes.c_size_t(3_000_000)))\n"
        "print(cuda.cuMemcpyDtoD_v2(u64(b.value + 2_999_000), a, ctypes.c_size_t(999)))\n"
        "print(cuda.cuMemcpyDtoH_v2(host, u64(b.value + 2_999_000), ctypes.c_size_t(1000)))\n"
        "print(host.raw == b'x' * 999 + bytes([7]))\n"
        "print(cuda.cuMemcpyDtoH_v2(host, u64(b.value + 3_000_000), ctypes.c_size_t(1000)))\n"
        "print(cuda.cuMemFree_v2(a), cuda.cuMemFree_v2(a))",
        ["0", "0", "0", "0", "True", "1", "0 1"],
    ),
    "unknown kernels": (
        "cuda.cuInit(0); context()\n"
        "module, function = ctypes.c_void_p(), ctypes.c_void_p()\n"
        "ptx = b'.version 7.0\\n.target sm_75\\n.visible .entry saxpy(.param .u64 p) { ret; }'\n"
        "print(cuda.cuModuleLoadData(byref(module), b'\\x7fELF'))\n"
        "print(cuda.cuModuleLoadData(byref(module), ptx))\n"
        "print(cuda.cuModuleGetFunction(byref(function), module, b'saxpy'))\n"
        "print(cuda.cuModuleGetFunction(byref(function), module, b'sax'))",
        ["200", "0", "801", "500"],
    ),
    "fork": (
        "cuda.cuInit(0); context()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    n = ctypes.c_int()\n"
        "    held = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')[:-1]]\n"
        "    print(cuda.cuDeviceGetCount(byref(n)), cuda.cuInit(0),\n"
        "          cuda.cuCheckpointProcessGetState(os.getpid(), byref(n)), any('gpucr-sim' in h for h in held),\n"
        "          flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0); print(allocate(1)[0])",
        ["3 3 3 False", "0"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_calls(run_program: RunProgram, case: str) -> None:
    source, expected = CASES[case]
    assert run_program(source) == expected


@pytest.mark.parametrize(
    ("visible", "count"), [("0", 1), ("1,0", 2), ("1,7,0", 1), ("-1", None), ("", None), ("GPU-", None)]
)
def test_visible_devices(run_program: RunProgram, visible: str, count: int | None) -> None:
    source = "n = ctypes.c_int(-1); print(cuda.cuInit(0)); cuda.cuDeviceGetCount(byref(n)); print(n.value)"
    expected = ["100", "-1"] if count is None else ["0", str(count)]
    assert run_program(source, CUDA_VISIBLE_DEVICES=visible) == expected


def test_visible_devices_by_uuid(run_program: RunProgram, machine: Machine) -> None:
    machine("4x1GiB")
    wanted = [gpu_uuids()[2], gpu_uuids()[0]]
    source = (
        "cuda.cuInit(0); n = ctypes.c_int(); cuda.cuDeviceGetCount(byref(n))\n"
        "for i in range(n.value):\n"
        "    raw = ctypes.create_string_buffer(16); cuda.cuDeviceGetUuid_v2(raw, i); print(raw.raw.hex())"
    )
    seen = run_program(source, CUDA_VISIBLE_DEVICES=",".join(wanted))
    assert seen == [uuid[4:].replace("-", "") for uuid in wanted]


def test_capacity_is_shared_and_dead_processes_hold_none(
    libcuda: Libcuda, counter: CounterFactory, machine: Machine, run_program: RunProgram
) -> None:
    machine("1x64MiB")
    program = counter("--mib", "40")
    source = (
        "cuda.cuInit(0); context(); free, total = ctypes.c_size_t(), ctypes.c_size_t()\n"
        "cuda.cuMemGetInfo_v2(byref(free), byref(total)); print(total.value >> 20)\n"
        "print(allocate(free.value + 1)[0], allocate(40 << 20)[0])"
    )
    held = used_bytes(program.pid)[0]
    assert run_program(source) == ["64", "2 2"]
    assert used_bytes(program.pid) == [held]
    program.kill()
    assert run_program(source) == ["64", "2 0"]
    assert used_bytes(program.pid) == [0]


def test_old_driver_has_no_checkpoint_functions(sim_environment: RunProgram) -> None:
    variables: dict[str, str] = sim_environment(driver="old")  # type: ignore[assignment]
    source = (
        "import ctypes; c = ctypes.CDLL('libcuda.so.1'); v = ctypes.c_int(); c.cuDriverGetVersion(ctypes.byref(v));"
        "print(c.cuInit(0), v.value, hasattr(c, 'cuCheckpointProcessLock'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "12040", "False"]


def test_a_process_that_never_called_cuinit_may_act(counter: CounterFactory) -> None:
    """One of its own: another test may have called it in this one."""
    source = (
        "import ctypes, sys; c = ctypes.CDLL('libcuda.so.1'); pid = int(sys.argv[1]); arguments = bytes(64);"
        "print(c.cuDeviceGetCount(ctypes.byref(ctypes.c_int())), c.cuCheckpointProcessLock(pid, arguments),"
        "c.cuCheckpointProcessCheckpoint(pid, arguments))"
    )
    command = [sys.executable, "-c", source, str(counter().pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["3", "0", "0"]
