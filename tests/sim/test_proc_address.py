"""cuGetProcAddress: every function is found under its base name, by the versions of CUDA that have this interface."""

from __future__ import annotations

import ctypes
import re
import subprocess

import pytest

from gpucr.sim import build as simulator
from tests.sim.libcuda import Libcuda, RunProgram

FOUND, SYMBOL_NOT_FOUND, VERSION_NOT_SUFFICIENT = range(3)
# All that introduced an interface which the simulator has.
VERSIONS = (
    2000,
    2020,
    3020,
    4000,
    4010,
    6000,
    6050,
    7000,
    9020,
    10000,
    10010,
    10020,
    11000,
    11020,
    11030,
    11040,
    11070,
    12000,
    12010,
    12080,
)


class Lookup:
    """Both look-ups of a libcuda, which may be one that no program has initialised."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def address(self, export: str) -> int | None:
        """What the dynamic loader gives."""
        return ctypes.cast(getattr(self._library, export), ctypes.c_void_p).value

    def find(self, name: str | None, version: int, flags: int = 0) -> tuple[int, int | None, int]:
        """(result, address, status) of cuGetProcAddress_v2."""
        function, status = ctypes.c_void_p(1), ctypes.c_int(-1)
        symbol = None if name is None else name.encode()
        result = self._library.cuGetProcAddress_v2(
            symbol, ctypes.byref(function), version, ctypes.c_uint64(flags), ctypes.byref(status)
        )
        return result, function.value, status.value

    def find_as_cuda_11(self, name: str, version: int) -> tuple[int, int | None]:
        """(result, address) of the first cuGetProcAddress."""
        function = ctypes.c_void_p(1)
        result = self._library.cuGetProcAddress(name.encode(), ctypes.byref(function), version, ctypes.c_uint64(0))
        return result, function.value


@pytest.fixture
def lookup(sim_only: None) -> Lookup:
    return Lookup("libcuda.so.1")


def exports(path: str) -> list[str]:
    """The functions of the driver API that a library exports."""
    table = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1] for line in table.splitlines() if line.split()[-1].startswith("cu")]


@pytest.mark.parametrize("folder", ["", "old/"])
def test_every_exported_function_is_found(sim_only: None, folder: str) -> None:
    path = str(simulator.build() / f"{folder}libcuda.so.1")
    lookup = Lookup(path)
    known = exports(path)
    assert "cuMemAlloc_v2" in known
    for export in known:
        base = re.sub(r"_v\d+$", "", export)
        assert (0, lookup.address(export), FOUND) in [lookup.find(base, version) for version in VERSIONS], export


@pytest.mark.parametrize(
    ("name", "version", "export"),
    [
        ("cuMemAlloc", 3020, "cuMemAlloc_v2"),
        ("cuMemAlloc", 13000, "cuMemAlloc_v2"),
        ("cuDeviceGetUuid", 11030, "cuDeviceGetUuid"),
        ("cuDeviceGetUuid", 11040, "cuDeviceGetUuid_v2"),
        ("cuGetProcAddress", 11080, "cuGetProcAddress"),
        ("cuGetProcAddress", 12000, "cuGetProcAddress_v2"),
        ("cuCtxCreate", 3010, "cuCtxCreate"),
        ("cuCheckpointProcessLock", 12080, "cuCheckpointProcessLock"),
    ],
)
def test_the_interface_of_the_version(lookup: Lookup, name: str, version: int, export: str) -> None:
    assert lookup.find(name, version) == (0, lookup.address(export), FOUND)
    assert lookup.find(name, version, flags=2) == (0, lookup.address(export), FOUND)
    assert lookup.find_as_cuda_11(name, version) == (0, lookup.address(export))


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [
        ("cuNoSuchFunction", 13000, SYMBOL_NOT_FOUND),
        ("cuMemAlloc_v2", 13000, SYMBOL_NOT_FOUND),  # a base name is asked for
        ("", 13000, SYMBOL_NOT_FOUND),
        ("cuCtxCreate", 12000, SYMBOL_NOT_FOUND),  # the driver has a newer interface, the simulator has not
        ("cuMemAlloc", 2000, VERSION_NOT_SUFFICIENT),
        ("cuCheckpointProcessLock", 12070, VERSION_NOT_SUFFICIENT),
    ],
)
def test_symbols_that_are_not_found(lookup: Lookup, name: str, version: int, status: int) -> None:
    assert lookup.find(name, version) == (0, None, status)
    assert lookup.find_as_cuda_11(name, version) == (500, None)


def test_invalid_requests(lookup: Lookup) -> None:
    assert lookup.find("cuInit", 13010)[0] == 1  # newer than the driver
    assert lookup.find("cuInit", 13000, flags=4)[0] == 1
    assert lookup.find(None, 13000)[0] == 1
    assert lookup.find_as_cuda_11("cuInit", 13010)[0] == 1


def test_a_driver_without_checkpoints(sim_only: None) -> None:
    lookup = Lookup(str(simulator.build() / "old" / "libcuda.so.1"))
    assert lookup.find("cuCheckpointProcessLock", 12040) == (0, None, SYMBOL_NOT_FOUND)
    assert lookup.find("cuInit", 12080)[0] == 1


def test_cuda_bindings_find_what_the_dynamic_loader_finds(libcuda: Libcuda, run_program: RunProgram) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    source = """
from cuda.bindings import driver
from cuda.bindings._internal.driver import _inspect_function_pointers
asked = {name.removeprefix("__"): address for name, address in _inspect_function_pointers().items()}
exported = {name: ctypes.cast(getattr(cuda, name), ctypes.c_void_p).value for name in asked if hasattr(cuda, name)}
print(len(exported) > 60, {name: asked[name] for name in exported} == exported)
print([name for name in asked if asked[name] and name not in exported])
result, = driver.cuInit(0)
print(int(result), [int(part) for part in driver.cuDriverGetVersion()])
try:
    driver.cuProfilerStart()
except RuntimeError as error:
    print("not found" in str(error))
"""
    assert run_program(source) == ["True True", "[]", "0 [0, 13000]", "True"]
