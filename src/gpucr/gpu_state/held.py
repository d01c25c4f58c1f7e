"""The device memory that a job holds, and which part of it its interposers can take.

NVML counts memory for the process that made it. What came back to a process by a descriptor was made by another one, or
by an earlier life of the same, and counts for nobody (measured, H100, driver 580: a process of 76 GiB shows 518 MiB).
Its interposer knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from gpucr.driver.api import Driver
from gpucr.driver.gpus import gpu_processes, list_gpus
from gpucr.gpu_state.placement import gpus_of
from gpucr.interposer.client import ask_blocks, ask_status
from gpucr.interposer.presence import is_interposed
from gpucr.interposer.protocol import ON_DEVICE, Block, Flag
from gpucr.linux import processes
from gpucr.model import CudaState, Gpu, GpuUse, Job, ProcessId


class CudaJob(Struct, frozen=True):
    """A job that uses CUDA, its driver, and what it has on GPUs. Read once, before anything is stopped.

    ``uses``: NVML's figures, of all processes. ``held``: the job's device memory in bytes, by pid and GPU UUID.
    """

    job: Job
    driver: Driver
    uses: Sequence[GpuUse]
    held: Mapping[int, Mapping[str, int]]

    @classmethod
    def seen(cls, job: Job, driver: Driver) -> CudaJob:
        """What it has now."""
        uses = gpu_processes()
        return cls(job, driver, uses, device_bytes_in_use(job, uses))

    @property
    def held_bytes(self) -> int:
        """All of its device memory."""
        return sum(sum(by_gpu.values()) for by_gpu in self.held.values())


def device_bytes_in_use(job: Job, uses: Sequence[GpuUse]) -> dict[int, dict[str, int]]:
    """Device memory of the job's processes, by pid and GPU UUID. ``uses``: NVML's figures; empty without NVML."""
    return _with_returned(
        _by_nvml(uses), [member.id for member in job.gang if member.found is not CudaState.CHECKPOINTED]
    )


def device_bytes_here(uses: Sequence[GpuUse]) -> dict[int, dict[str, int]]:
    """Device memory of all processes that NVML knows, by pid and GPU UUID."""
    held = _by_nvml(uses)
    stats = {pid: processes.read_stat(pid) for pid in held}
    alive = [ProcessId(pid, stat.start_time_ticks) for pid, stat in stats.items() if stat is not None]
    return _with_returned(held, alive)


def _with_returned(held: dict[int, dict[str, int]], of: Iterable[ProcessId]) -> dict[int, dict[str, int]]:
    """NVML's figures of these processes, and what they have without NVML counting it."""
    wanted = list(of)
    found = {process.pid: dict(held[process.pid]) for process in wanted if process.pid in held}
    here: tuple[Gpu, ...] | None = None
    for process in wanted:
        returned = _returned(process.pid) if process.pid in found else []
        if not returned:
            continue
        here = list_gpus() if here is None else here
        _add(found[process.pid], returned, [gpu.uuid for gpu in gpus_of(process, here, used=held[process.pid]).visible])
    return found


def _by_nvml(uses: Sequence[GpuUse]) -> dict[int, dict[str, int]]:
    found: dict[int, dict[str, int]] = {}
    for use in uses:
        if use.used_bytes is not None:
            by_gpu = found.setdefault(use.pid, {})
            by_gpu[use.gpu_uuid] = by_gpu.get(use.gpu_uuid, 0) + use.used_bytes
    return found


def _returned(pid: int) -> list[Block]:
    try:
        status = ask_status(pid) if is_interposed(pid) else None
    except PermissionError:  # another user's: NVML's figures have to do
        return []
    if status is None or not status.foreign:
        return []
    return [each for each in ask_blocks(pid) or () if each.flags & Flag.RETURNED and not each.flags & Flag.AWAY]


def _add(total: dict[str, int], blocks: Iterable[Block], uuids: Sequence[str]) -> None:
    for each in blocks:
        if each.location_type == ON_DEVICE and each.location < len(uuids):
            total[uuids[each.location]] = total.get(uuids[each.location], 0) + each.size_bytes
