"""Room on the GPUs for what the driver brings back.

A restore that runs out of device memory loses the process (measured, driver 580: result 2, and 304 ever after). Between
a checkpoint and its restore the memory is anybody's. So nothing is restored before there is room, and while a job's
memory is away it waits for others to leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from gpucr.driver.gpus import gpu_processes, list_gpus
from gpucr.errors import GpuFull
from gpucr.quantities import format_bytes

LOOK_EVERY_S = 0.05
ROOM_LIMIT_S = 20.0
"""How long an operation waits for room before it leaves the job to its guard, which waits without a limit."""


def total_of(needs: Mapping[int, Mapping[str, int]], pids: Iterable[int]) -> dict[str, int]:
    """What these CHECKPOINTED processes need together, in bytes by GPU UUID. ``needs``: what they held before."""
    total: dict[str, int] = {}
    for by_gpu in without_what_stays({pid: needs[pid] for pid in pids if pid in needs}).values():
        for uuid, size_bytes in by_gpu.items():
            total[uuid] = total.get(uuid, 0) + size_bytes
    return total


def without_what_stays(held: Mapping[int, Mapping[str, int]]) -> dict[int, dict[str, int]]:
    """What a checkpoint took of the device memory that processes held before it, by pid and GPU UUID.

    It leaves what is not CUDA's: contexts of OpenCL stay on the GPU, and in NVML's figures (driver 580).
    """
    stays = {(use.pid, use.gpu_uuid): use.used_bytes or 0 for use in gpu_processes()} if held else {}
    return {
        pid: {uuid: max(0, size_bytes - stays.get((pid, uuid), 0)) for uuid, size_bytes in by_gpu.items()}
        for pid, by_gpu in held.items()
    }


def lacking(needed_bytes: Mapping[str, int]) -> dict[str, int]:
    """By UUID, how much is missing on each GPU that has less than this free. GPUs that NVML does not know have room."""
    free = {gpu.uuid: gpu.memory_free_bytes for gpu in list_gpus()}
    missing = {uuid: needed - free.get(uuid, needed) for uuid, needed in needed_bytes.items()}
    return {uuid: size_bytes for uuid, size_bytes in missing.items() if size_bytes > 0}


def wait_for_room(
    needed_bytes: Mapping[str, int], limit_s: float | None, on_wait: Callable[[str], object] = lambda text: None
) -> None:
    """Return when these GPUs have so much free, in bytes by UUID. ``on_wait`` is told once why this takes time.

    Raises GpuFull after ``limit_s`` (None: never).
    """
    end = None if limit_s is None else time.monotonic() + limit_s
    told = False
    while missing := lacking(needed_bytes):
        uuid, size_bytes = next(iter(missing.items()))
        text = f"GPU {uuid} was filled by others meanwhile: {format_bytes(size_bytes)} are missing for the job's return"
        if end is not None and time.monotonic() > end:
            raise GpuFull(text, hint="end what uses that GPU; gpucr brings the job back as soon as there is room")
        if not told:
            on_wait(f"{text}; waiting")
            told = True
        time.sleep(LOOK_EVERY_S)
