"""Where device memory goes: the staging area, the device files, other GPUs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from gpucr.driver import gpus
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import DriverError
from gpucr.linux.memory import new_anonymous_ranges, read_maps
from gpucr.linux.processes import open_files
from gpucr.model import CudaState, Gpu, GpuMap
from tests.counter import Counter, CounterFactory

MIB = 1 << 20
UNKNOWN_GPU = "GPU-00000000-1111-2222-3333-444444444444"


@pytest.fixture
def two_gpus() -> tuple[Gpu, Gpu]:
    found = gpus.list_gpus()
    if len(found) < 2:
        pytest.skip("needs 2 GPUs")
    return found[0], found[1]


def suspend(driver: CudaDriver, pid: int) -> None:
    driver.lock(pid)
    driver.checkpoint(pid)


def resume(driver: CudaDriver, pid: int, gpu_map: GpuMap | None = None) -> None:
    driver.restore(pid, gpu_map)
    driver.unlock(pid)


def test_staging_is_one_new_anonymous_mapping_until_restore(driver: CudaDriver, counter: CounterFactory) -> None:
    program = counter("--mib", "64")
    driver.lock(program.pid)
    before = read_maps(program.pid)
    driver.checkpoint(program.pid)
    staging = max(new_anonymous_ranges(before, read_maps(program.pid)), key=lambda extent: extent.size_bytes)
    assert staging.size_bytes >= 64 * MIB
    driver.restore(program.pid)
    left = [extent.size_bytes for extent in new_anonymous_ranges(before, read_maps(program.pid))]
    assert max(left, default=0) < 64 * MIB


def test_files_that_criu_cannot_dump_are_closed_while_checkpointed(
    driver: CudaDriver, counter: CounterFactory, platform: str
) -> None:
    undumpable = {"gpu": "/dev/nvidia", "sim": "anon_inode:[userfaultfd]"}[platform]
    pid = counter("--mib", "4").pid

    def held() -> list[str]:
        return [file.target for file in open_files(pid) if file.target.startswith(undumpable)]

    assert held()
    suspend(driver, pid)
    assert not held()
    resume(driver, pid)
    assert held()


def test_device_memory_is_free_while_checkpointed(driver: CudaDriver, counter: CounterFactory) -> None:
    program = counter("--mib", "256")
    running = gpus.list_gpus()[0].memory_free_bytes
    suspend(driver, program.pid)
    checkpointed = gpus.list_gpus()[0].memory_free_bytes
    assert checkpointed - running >= 256 * MIB
    resume(driver, program.pid)
    assert checkpointed - gpus.list_gpus()[0].memory_free_bytes >= 256 * MIB


def test_processes_are_listed_while_they_hold_a_gpu(driver: CudaDriver, counter: CounterFactory) -> None:
    listed_before = len(gpus.gpu_processes())
    program = counter("--mib", "4")
    assert len(gpus.gpu_processes()) == listed_before + 1
    suspend(driver, program.pid)
    assert len(gpus.gpu_processes()) == listed_before


def test_two_processes_at_once(driver: CudaDriver, counter: CounterFactory) -> None:
    programs = [counter("--mib", "32"), counter("--mib", "32")]

    def round_trip(program: Counter) -> str:
        suspend(driver, program.pid)
        resume(driver, program.pid)
        return program.send("verify")

    with ThreadPoolExecutor(len(programs)) as pool:
        assert list(pool.map(round_trip, programs)) == ["ok", "ok"]
    assert [program.ask() for program in programs] == [101, 101]


def test_one_process_on_two_gpus(driver: CudaDriver, counter: CounterFactory, two_gpus: tuple[Gpu, Gpu]) -> None:
    program = counter("--mib", "32", "--devices", "0,1")
    suspend(driver, program.pid)
    resume(driver, program.pid)
    assert program.ask() == 101
    assert program.send("verify") == "ok"


def test_swapped_gpus(driver: CudaDriver, counter: CounterFactory, two_gpus: tuple[Gpu, Gpu]) -> None:
    first, second = two_gpus
    program = counter("--mib", "256", "--devices", "0")
    suspend(driver, program.pid)
    free = [gpu.memory_free_bytes for gpu in gpus.list_gpus()[:2]]
    resume(driver, program.pid, complete_map({first.uuid: second.uuid, second.uuid: first.uuid}))
    taken = [before - gpu.memory_free_bytes for before, gpu in zip(free, gpus.list_gpus()[:2], strict=True)]
    assert taken[1] >= 256 * MIB > taken[0]
    assert program.ask() == 101
    assert program.send("verify") == "ok"


def test_partial_gpu_map_is_refused_and_a_correct_retry_works(
    driver: CudaDriver, counter: CounterFactory, two_gpus: tuple[Gpu, Gpu]
) -> None:
    program = counter("--mib", "4")
    suspend(driver, program.pid)
    refused(driver, program.pid, GpuMap(((two_gpus[0].uuid, two_gpus[0].uuid),)))
    resume(driver, program.pid, complete_map({}))
    assert program.ask() == 101
    assert program.send("verify") == "ok"


def test_two_gpus_cannot_map_to_one(driver: CudaDriver, counter: CounterFactory, two_gpus: tuple[Gpu, Gpu]) -> None:
    program = counter("--mib", "4")
    suspend(driver, program.pid)
    refused(driver, program.pid, complete_map({two_gpus[1].uuid: two_gpus[0].uuid}))
    resume(driver, program.pid)
    assert program.ask() == 101


def test_a_process_that_sees_one_gpu_moves_to_another(
    driver: CudaDriver, counter: CounterFactory, two_gpus: tuple[Gpu, Gpu]
) -> None:
    """The driver needs a target for the hidden GPU too. On the way back it uses the new UUIDs."""
    first, second = two_gpus
    program = counter("--mib", "4", env={"CUDA_VISIBLE_DEVICES": first.uuid})
    swapped = complete_map({first.uuid: second.uuid, second.uuid: first.uuid})
    for old, new in ((first, second), (second, first)):
        suspend(driver, program.pid)
        refused(driver, program.pid, GpuMap(((old.uuid, new.uuid),)))
        resume(driver, program.pid, swapped)
        assert [use.gpu_uuid for use in gpus.gpu_processes() if use.pid == program.pid] == [new.uuid]
    assert program.ask() == 101
    assert program.send("verify") == "ok"


def test_unknown_gpu_in_the_map(driver: CudaDriver, counter: CounterFactory) -> None:
    program = counter("--mib", "4")
    suspend(driver, program.pid)
    refused(driver, program.pid, complete_map({gpus.list_gpus()[0].uuid: UNKNOWN_GPU}))
    resume(driver, program.pid)
    assert program.ask() == 101


def complete_map(changes: dict[str, str]) -> GpuMap:
    """A map of every GPU onto itself, except for the changes."""
    return GpuMap(tuple((gpu.uuid, changes.get(gpu.uuid, gpu.uuid)) for gpu in gpus.list_gpus()))


def refused(driver: CudaDriver, pid: int, gpu_map: GpuMap) -> None:
    with pytest.raises(DriverError) as caught:
        driver.restore(pid, gpu_map)
    assert (caught.value.result, caught.value.state) == (1, "checkpointed")
    assert driver.state(pid) == CudaState.CHECKPOINTED
