"""Result codes become errors with the process, the action, its state, and what to do."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucr.driver import libcuda
from gpucr.driver.cuda import CudaDriver, load_driver
from gpucr.errors import (
    DriverError,
    DriverUnavailable,
    IllegalState,
    InvalidRequest,
    LockTimeout,
    NotSupportedByDriver,
    ProcessNotFound,
    Unsupported,
)
from gpucr.model import CudaState, GpuMap
from tests.counter import CounterFactory

SimEnvironment = Callable[..., dict[str, str]]
BEFORE = {"lock": (), "checkpoint": ("lock",), "restore": ("lock", "checkpoint"), "unlock": ("lock",)}
STATE_BEFORE = {"lock": "running", "checkpoint": "locked", "restore": "checkpointed", "unlock": "locked"}
A_GPU = "GPU-00000000-1111-2222-3333-444444444444"


@pytest.mark.parametrize("action", list(BEFORE))
@pytest.mark.parametrize(
    ("result", "name", "error"),
    [
        (401, "CUDA_ERROR_ILLEGAL_STATE", IllegalState),
        (600, "CUDA_ERROR_NOT_READY", LockTimeout),
        (801, "CUDA_ERROR_NOT_SUPPORTED", NotSupportedByDriver),
        (2, "CUDA_ERROR_OUT_OF_MEMORY", DriverError),
        (304, "CUDA_ERROR_OPERATING_SYSTEM", DriverError),
        (999, "CUDA_ERROR_UNKNOWN", DriverError),
        (4242, "CUresult 4242", DriverError),
    ],
)
def test_result_codes(
    driver: CudaDriver,
    counter: CounterFactory,
    sim_environment: SimEnvironment,
    action: str,
    result: int,
    name: str,
    error: type[DriverError],
) -> None:
    pid = counter("--mib", "1", env=sim_environment(faults=f"{action}={result}")).pid
    for step in BEFORE[action]:
        getattr(driver, step)(pid)
    with pytest.raises(DriverError) as caught:
        getattr(driver, action)(pid)
    raised = caught.value
    assert type(raised) is error
    assert (raised.pid, raised.action, raised.result, raised.state) == (pid, action, result, STATE_BEFORE[action])
    assert f"cannot {action} process {pid}: {name} ({result}), " in raised.message


@pytest.mark.parametrize(
    ("action", "result", "words"),
    [
        ("lock", 401, "the process is running, and lock needs it running"),
        ("restore", 401, "`gpucr resume`"),
        ("lock", 600, "allow more time"),
        ("lock", 801, "profiler"),
        ("checkpoint", 801, "managed memory"),
        ("restore", 1, "GPU map"),
        ("restore", 2, "free memory"),
        ("restore", 801, "shared"),
        ("restore", 304, "ran out of memory"),
        ("checkpoint", 304, "pid namespace"),
    ],
)
def test_hints(
    driver: CudaDriver, counter: CounterFactory, sim_environment: SimEnvironment, action: str, result: int, words: str
) -> None:
    pid = counter("--mib", "1", env=sim_environment(faults=f"{action}={result}")).pid
    for step in BEFORE[action]:
        getattr(driver, step)(pid)
    with pytest.raises(DriverError) as caught:
        getattr(driver, action)(pid)
    assert words in (caught.value.hint or "")


@pytest.mark.parametrize(("mode", "is_advised"), [(False, True), (True, False), (None, False)])
def test_persistence_mode_is_advised_when_off(
    driver: CudaDriver,
    counter: CounterFactory,
    sim_environment: SimEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    mode: bool | None,
    is_advised: bool,
) -> None:
    pid = counter("--mib", "1", env=sim_environment(faults="restore=304")).pid
    for step in BEFORE["restore"]:
        getattr(driver, step)(pid)
    monkeypatch.setattr("gpucr.driver.gpus.persistence_mode", lambda: mode)
    with pytest.raises(DriverError) as caught:
        driver.restore(pid)
    assert ("persistence mode" in str(caught.value.hint)) is is_advised


def test_a_failed_state_is_reported(
    driver: CudaDriver, counter: CounterFactory, sim_environment: SimEnvironment
) -> None:
    pid = counter("--mib", "1", env=sim_environment(faults="checkpoint=999:failed")).pid
    driver.lock(pid)
    with pytest.raises(DriverError) as caught:
        driver.checkpoint(pid)
    assert caught.value.state == "failed"
    assert driver.state(pid) is CudaState.FAILED


@pytest.mark.parametrize("timeout_ms", [-1, 2**32])
def test_timeout_that_does_not_fit(driver: CudaDriver, counter: CounterFactory, timeout_ms: int) -> None:
    program = counter()
    with pytest.raises(InvalidRequest):
        driver.lock(program.pid, timeout_ms)
    assert driver.state(program.pid) is CudaState.RUNNING


# --- loading ---------------------------------------------------------------------------------------------------


def test_no_library(tmp_path: Path) -> None:
    missing = str(tmp_path / "libcuda.so.1")
    with pytest.raises(libcuda.LibraryNotLoaded):
        libcuda.load(missing)
    with pytest.raises(DriverUnavailable) as caught:
        load_driver(missing)
    assert isinstance(caught.value.__cause__, libcuda.LibraryNotLoaded)
    assert "570" in (caught.value.hint or "")


def test_not_a_library(tmp_path: Path) -> None:
    damaged = tmp_path / "libcuda.so.1"
    damaged.write_bytes(b"\x7fELF")
    with pytest.raises(DriverUnavailable):
        load_driver(str(damaged))


def test_library_without_the_functions() -> None:
    with pytest.raises(libcuda.FunctionsMissing) as caught:
        libcuda.Libcuda(ctypes.CDLL("libc.so.6"))
    assert "cuCheckpointProcessLock" in caught.value.names


def test_driver_without_the_checkpoint_functions(sim_environment: SimEnvironment) -> None:
    old = Path(sim_environment(driver="old")["LD_LIBRARY_PATH"].partition(":")[0]) / "libcuda.so.1"
    with pytest.raises(DriverUnavailable, match="cuCheckpointProcessGetState") as caught:
        load_driver(str(old))
    assert isinstance(caught.value.__cause__, libcuda.FunctionsMissing)
    assert "cuInit" not in caught.value.__cause__.names


def test_capabilities(driver: CudaDriver) -> None:
    capabilities = driver.capabilities()
    assert capabilities.cuda_version >= 12080
    assert capabilities.gpu_map == (capabilities.cuda_version >= 13000)


def test_a_gpu_map_needs_a_driver_that_supports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = libcuda.load()
    monkeypatch.setattr(library, "version", lambda: (0, 12090))
    driver = CudaDriver(library)
    assert not driver.capabilities().gpu_map
    with pytest.raises(Unsupported):
        driver.restore(os.getpid(), GpuMap(((A_GPU, A_GPU),)))


def test_restore_initializes_cuda_only_if_persistence_mode_is_off(
    monkeypatch: pytest.MonkeyPatch, counter: CounterFactory
) -> None:
    library = libcuda.load()
    initialized: list[str] = []

    def init() -> int:
        initialized.append("cuInit")
        return libcuda.SUCCESS

    monkeypatch.setattr(library, "init", init)
    driver = CudaDriver(library)
    program = counter("--mib", "1")
    for persistence_mode, calls in ((True, 0), (None, 0), (False, 1), (False, 1)):
        monkeypatch.setattr("gpucr.driver.gpus.persistence_mode", lambda answer=persistence_mode: answer)
        driver.lock(program.pid)
        driver.checkpoint(program.pid)
        driver.restore(program.pid)
        driver.unlock(program.pid)
        assert len(initialized) == calls
    assert program.ask() == 101


def test_cuinit_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    library = libcuda.load()
    monkeypatch.setattr(library, "init", lambda: libcuda.NO_DEVICE)
    with pytest.raises(DriverUnavailable, match="CUDA_ERROR_NO_DEVICE"):
        CudaDriver(library).ensure_initialized()


def test_binding_imports_little() -> None:
    script = "import sys; before = set(sys.modules); import gpucr.driver.libcuda; print(*(set(sys.modules) - before))"
    modules = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    own = {name for name in modules if name.startswith("gpucr")}
    assert own == {"gpucr", "gpucr.version", "gpucr.driver", "gpucr.driver.libcuda"}
    heavy = {"dataclasses", "enum", "typing", "re", "inspect", "contextlib", "collections", "pathlib", "subprocess"}
    assert heavy.isdisjoint(modules)


# --- drivers that answer differently from the one at hand -------------------------------------------------------


def test_missing_context_of_a_zombie_is_a_missing_process(monkeypatch: pytest.MonkeyPatch) -> None:
    library = libcuda.load()
    monkeypatch.setattr(library, "process_state", lambda _: (libcuda.NOT_INITIALIZED, 0))
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessNotFound, match="zombie"):
            CudaDriver(library).state(process.pid)


@pytest.mark.parametrize("refusal", [libcuda.NOT_INITIALIZED, libcuda.OPERATING_SYSTEM])
def test_a_thread_id_the_driver_refuses(monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    library = libcuda.load()
    answers = {os.getpid(): (libcuda.SUCCESS, libcuda.LOCKED)}
    monkeypatch.setattr(library, "process_state", lambda pid: answers.get(pid, (refusal, 0)))
    with ThreadPoolExecutor(1) as pool:
        thread_id = pool.submit(threading.get_native_id).result()
        assert CudaDriver(library).state(thread_id) is CudaState.LOCKED


def test_gpu_pairs_arrive_as_old_and_new(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[tuple[int, bytes, bytes]] = []

    def restore(pid: int, args: Any) -> int:
        pairs = args.contents.gpuPairs[: args.contents.gpuPairsCount]
        arrived.extend((pid, bytes(pair.oldUuid), bytes(pair.newUuid)) for pair in pairs)
        return libcuda.SUCCESS

    library = libcuda.load()
    called_from_c = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(libcuda.RestoreArgs))(restore)
    monkeypatch.setattr(library, "_cuda", SimpleNamespace(cuCheckpointProcessRestore=called_from_c))
    a, b, c = (bytes([value] * 16) for value in (1, 2, 3))
    assert library.restore(7, [(a, b), (b, c), (c, a)]) == libcuda.SUCCESS
    assert arrived == [(7, a, b), (7, b, c), (7, c, a)]
    with pytest.raises(ValueError, match="16 bytes"):
        library.restore(7, [(a, b"short")])
