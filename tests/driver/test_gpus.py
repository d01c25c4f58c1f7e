"""The GPU inventory: with GPUs, without, and with an NVML that is broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from gpucr.driver import gpus
from gpucr.errors import DriverUnavailable
from gpucr.model import Gpu, uuid_bytes
from tests.counter import CounterFactory

ASK = (
    "import json; from gpucr.driver import gpus;"
    "print(json.dumps([len(gpus.list_gpus()), len(gpus.gpu_processes()), gpus.driver_version(),"
    " gpus.persistence_mode()]))"
)


def ask(env: dict[str, str]) -> list[object]:
    done = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, check=True)
    answer: list[object] = json.loads(done.stdout)
    return answer


def test_gpus_of_this_machine() -> None:
    found = gpus.list_gpus()
    assert [gpu.index for gpu in found] == list(range(len(found)))
    assert len({gpu.uuid for gpu in found}) == len(found) > 0
    for gpu in found:
        assert len(uuid_bytes(gpu.uuid)) == 16
        assert gpu.name
        assert 0 < gpu.memory_free_bytes <= gpu.memory_total_bytes
        assert not gpu.mig_enabled


def test_driver_version_and_persistence_mode() -> None:
    assert re.fullmatch(r"\d+(\.\d+)+", gpus.driver_version() or "")
    assert gpus.persistence_mode() in (True, False)
    assert gpus.persistence_mode(gpus.list_gpus()[0].uuid) in (True, False)


def test_chosen_gpus(sim_environment: Callable[..., dict[str, str]]) -> None:
    answer = ask({**os.environ, **sim_environment("3x24GiB", machine="another")})
    assert answer[0] == 3


@pytest.mark.usefixtures("sim_only")
def test_machine_without_nvml() -> None:
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    assert ask(env) == [0, 0, None, None]


def test_use_of_a_gpu(counter: CounterFactory) -> None:
    before = gpus.gpu_processes()
    counter("--mib", "64")
    new = [use for use in gpus.gpu_processes() if use not in before]
    assert [use.gpu_uuid for use in new] == [gpus.list_gpus()[0].uuid]
    used = new[0].used_bytes
    assert used is None or used >= 64 << 20


def failing(code: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise pynvml.NVMLError(code)

    return fail


def test_broken_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", failing(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH))
    for query in (gpus.list_gpus, gpus.gpu_processes, gpus.driver_version, gpus.persistence_mode):
        with pytest.raises(DriverUnavailable) as caught:
            query()
        assert isinstance(caught.value.__cause__, pynvml.NVMLError)


def test_driver_that_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", failing(pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
    assert (gpus.list_gpus(), gpus.gpu_processes(), gpus.driver_version()) == ((), (), None)


def test_init_and_shutdown_are_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def recording(name: str, original: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            calls.append(name)
            original()

        return call

    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, recording(name, getattr(pynvml, name)))
    gpus.list_gpus()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", failing(pynvml.NVML_ERROR_UNKNOWN))
    with pytest.raises(DriverUnavailable):
        gpus.list_gpus()
    assert calls == ["nvmlInit", "nvmlShutdown"] * 2


def test_mig_mode_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda _: [pynvml.NVML_DEVICE_MIG_ENABLE, 0])
    assert {gpu.mig_enabled for gpu in gpus.list_gpus()} == {True}


A, B, C = "GPU-aaaa1111-0000-4000-8000-000000000000", "GPU-aaaa2222-0000-4000-8000-000000000000", "GPU-cccc-0"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(None, [A, B, C], id="not set"),
        pytest.param("1", [B]),
        pytest.param("2,0", [C, A]),
        pytest.param(" 2 , 1", [C, B]),
        pytest.param(A, [A], id="a UUID"),
        pytest.param("GPU-cc,GPU-aaaa2", [C, B]),
        pytest.param("", [], id="empty"),
        pytest.param("-1", []),
        pytest.param("0,9,1", [A], id="the list ends at the first that is invalid"),
        pytest.param("0,GPU-aaaa,1", [A], id="a beginning that two have"),
        pytest.param("1,GPU-aaaa2,0", [B, A], id="one twice"),
        pytest.param("MIG-aaaa1111", []),
    ],
)
def test_gpus_that_cuda_visible_devices_shows(value: str | None, expected: list[str]) -> None:
    machine = [Gpu(index, uuid, "NVIDIA H200", 2, 1) for index, uuid in enumerate((A, B, C))]
    environment = {"PATH": "/bin"} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [gpu.uuid for gpu in gpus.visible_gpus(machine, environment)] == expected


def test_indices_count_the_containers_gpus() -> None:
    machine = [Gpu(index, uuid, "NVIDIA H200", 2, 1) for index, uuid in enumerate((A, B, C))]
    assert gpus.visible_gpus(machine[1:], {"CUDA_VISIBLE_DEVICES": "1"}) == (machine[2],)


@pytest.fixture
def device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's data about a machine: GPU B is nvidia0, A is nvidia1, and C is elsewhere."""
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path / "dev")
    monkeypatch.setattr(gpus, "_DRIVER_FACTS", tmp_path / "facts")
    (tmp_path / "dev").mkdir()
    for minor, uuid in enumerate((B, A, C)):
        folder = tmp_path / "facts" / f"0000:0{minor}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n")
    for minor in (0, 1):
        (tmp_path / "dev" / f"nvidia{minor}").touch()
    return tmp_path


@pytest.mark.parametrize(("has", "expected"), [([0, 1], [A, B, C]), ([0], [B, C]), ([1], [A, C]), ([], [C])])
def test_gpus_with_a_device_file_in_the_container(has: list[int], expected: list[str], device_files: Path) -> None:
    machine = [Gpu(index, uuid, "NVIDIA H200", 2, 1) for index, uuid in enumerate((A, B, C))]
    root = device_files / "root"
    (root / "dev").mkdir(parents=True)
    for minor in has:
        (root / "dev" / f"nvidia{minor}").touch()
    assert [gpu.uuid for gpu in gpus.gpus_with_device_file(machine, root)] == expected


def test_inconclusive_device_files(device_files: Path) -> None:
    machine = (Gpu(0, B, "NVIDIA H200", 2, 1),)
    assert gpus.gpus_with_device_file(machine, device_files / "empty") == ()
    assert gpus.gpus_with_device_file(machine, device_files / ("n" * 300)) == machine  # cannot be looked into
    for path in device_files.glob("facts/*/information"):
        path.write_bytes(b"GPU UUID: GPU-????\n")  # asleep
    assert gpus.gpus_with_device_file(machine, device_files / "empty") == machine
    for path in device_files.glob("facts/*/information"):
        path.write_bytes(b"\xff")
    assert gpus.gpus_with_device_file(machine, device_files / "empty") == machine


def test_queries_an_older_nvml_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch(*_: object) -> None:
        raise pynvml.NVMLLibraryMismatchError("Unversioned function called")

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", mismatch)
    assert {gpu.mig_enabled for gpu in gpus.list_gpus()} <= {False}


def test_gpu_pairs_without_peer_access(sim_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCR_SIM_GPUS", "3x1GiB")
    uuids = [gpu.uuid for gpu in gpus.list_gpus()]
    pairs = {frozenset((uuids[0], uuids[1])), frozenset((uuids[0], uuids[2])), frozenset((uuids[1], uuids[2]))}
    assert gpus.unreachable_pairs() == pairs
    monkeypatch.setenv("GPUCR_SIM_PEERS", "1")
    assert gpus.unreachable_pairs() == frozenset()


def test_nobody_uses_mps() -> None:
    assert gpus.mps_clients() == frozenset()


def noting(name: str, events: list[str]) -> Callable[[], None]:
    function: Callable[[], None] = getattr(pynvml, name)

    def call() -> None:
        events.append(name)
        function()

    return call


def test_nvml_kept_open_is_initialised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, noting(name, events))
    with gpus.nvml_kept_open():
        known = gpus.list_gpus()
        assert events[-1] == "nvmlShutdown"
        assert events.count("nvmlInit") == events.count("nvmlShutdown") + 1, "one more than was shut down"
    assert events.count("nvmlInit") == events.count("nvmlShutdown")
    assert known == gpus.list_gpus()


def test_without_nvml_nothing_is_kept_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    with gpus.nvml_kept_open():
        assert gpus.unreachable_pairs() == frozenset()
        assert gpus.mps_clients() == frozenset()
