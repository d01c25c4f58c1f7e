"""Room for what an operation moves: host memory, within cgroup limits, and disk space."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import machine as facts
from gpucr.linux import cgroups, memory
from gpucr.linux.one_look import OneLook
from gpucr.model import Job
from gpucr.quantities import format_bytes

_DISK_MARGIN_BYTES = 64 << 20

_WORK_BYTES, _PROCESS_BYTES = 64 << 20, 12 << 20
_PAGE_TABLES_SHARE = 128
"""Small pages have 8 bytes of page table for 4096 bytes, in the process and in gpucr; this is twice that."""

_VAULT_BYTES = 512 << 20
"""Host memory of gpucr's own CUDA context and its pinned ring, per GPU. Measured (H200 machine): 0.38 GiB."""

_BUFFERS_A_BYTE = 4
"""Buffers are touched only where there is data: a piece and its stored form."""


def check_disk(job: Job, folder: Path, device_bytes: int, *, surely_bytes: int | None = None) -> list[Finding]:
    """Free disk space against the memory that would be written: resident pages and device memory.

    ``surely_bytes`` are written in any case (None: all of device memory).
    """
    resident = sum(memory.resident_bytes(pid) for pid in job.pids)
    free = memory.free_disk_bytes(folder)
    # Resident file pages are not written, so the sum is no lower bound: only device memory is certain.
    surely = (device_bytes if surely_bytes is None else surely_bytes) + _DISK_MARGIN_BYTES
    likely = device_bytes + resident + _DISK_MARGIN_BYTES
    if free >= likely:
        return []
    fact = facts.DISK if surely_bytes is None else facts.DISK_OF_STORE
    return [
        fact.seen(
            f"device memory {format_bytes(device_bytes)}, resident memory {format_bytes(resident)}",
            as_warning=free >= surely,
            folder=folder,
            free=format_bytes(free),
            needed=format_bytes(likely),
            missing=format_bytes(likely - free),
        )
    ]


class MemoryNeed(Struct, frozen=True):
    """Host memory that an operation needs, and the process whose cgroup is charged."""

    pid: int
    size_bytes: int


def needs_of_suspend(
    held: Mapping[int, Mapping[str, int]], *, in_files: bool, on_gpu: Mapping[str, int] = MappingProxyType({})
) -> list[MemoryNeed]:
    """Each process holds its own device memory or, with ``in_files``, gpucr's files hold it.

    ``held``: see `device_bytes_in_use`; ``on_gpu``: the part that stays on the GPU, in bytes per UUID.
    """
    work = _need_of_work(len(held), _total(held), len(on_gpu) * _VAULT_BYTES)
    if in_files:
        return [MemoryNeed(os.getpid(), max(0, _total(held) - sum(on_gpu.values()))), work]
    return [*(MemoryNeed(pid, sum(by_gpu.values())) for pid, by_gpu in held.items()), work]


def needs_of_dump(
    held: Mapping[int, Mapping[str, int]],
    folder: Path | None,
    pids: Sequence[int],
    buffers_bytes: int,
    on_gpu: Mapping[str, int] = MappingProxyType({}),
    look: OneLook | None = None,
) -> list[MemoryNeed]:
    """gpucr's staging files hold all device memory, and the snapshot as much again if it is in memory.

    Then it also holds the private memory of the processes ``pids``. ``folder``: where the snapshot goes, or the folder
    that it will be made in; None: to another machine. ``buffers_bytes``: buffers of the saving threads. ``on_gpu``:
    device memory that goes straight from its GPU to the snapshot, in bytes per UUID.
    """
    look = look or OneLook()
    device_bytes, images_bytes = _total(held), sum(look.anonymous_bytes(pid) for pid in pids)
    buffers_bytes = min(buffers_bytes, _BUFFERS_A_BYTE * (device_bytes + images_bytes))
    needs = [
        MemoryNeed(os.getpid(), max(0, device_bytes - sum(on_gpu.values()))),
        _need_of_work(len(pids), device_bytes, buffers_bytes + len(on_gpu) * _VAULT_BYTES),
    ]
    if folder is not None and memory.lies_in_memory(folder):
        needs.append(MemoryNeed(os.getpid(), device_bytes + images_bytes))
    return needs


def needs_of_restore(
    device_bytes: int, *, processes: int, private_bytes: int = 0, buffers_bytes: int, vaults: int = 0
) -> list[MemoryNeed]:
    """gpucr's staging files hold all device memory until the driver has taken it.

    ``private_bytes``: the private memory of the processes, which CRIU makes again. ``vaults``: the GPUs that gpucr
    fills itself.
    """
    buffers_bytes = min(buffers_bytes, _BUFFERS_A_BYTE * (device_bytes + private_bytes))
    work = _need_of_work(processes, device_bytes, buffers_bytes + vaults * _VAULT_BYTES)
    return [MemoryNeed(os.getpid(), device_bytes + private_bytes), work]


def _need_of_work(processes: int, device_bytes: int, buffers_bytes: int) -> MemoryNeed:
    """What gpucr, its guard and CRIU need besides device memory, after preflight: at least 1.7 times the measurement.

    docs/figures.md, Host memory besides device memory, has the figures and how they were taken.
    """
    page_tables_bytes = device_bytes // _PAGE_TABLES_SHARE
    return MemoryNeed(os.getpid(), _WORK_BYTES + processes * _PROCESS_BYTES + buffers_bytes + page_tables_bytes)


def _total(held: Mapping[int, Mapping[str, int]]) -> int:
    return sum(sum(by_gpu.values()) for by_gpu in held.values())


def check_host_memory(needs: Sequence[MemoryNeed]) -> list[Finding]:
    """Compare the needed host memory with what the machine, and each charged cgroup, can still give.

    If memory runs out midway the kernel does not refuse but kills: the job, or gpucr with the job's data.
    """
    total = sum(need.size_bytes for need in needs)
    available = memory.machine_available_bytes()
    found: list[Finding] = []
    if total > available:
        found.append(
            facts.HOST_MEMORY.seen(
                f"MemAvailable in /proc/meminfo; the operation needs {format_bytes(total)}",
                free=format_bytes(available),
                missing=format_bytes(total - available),
            )
        )
    # Processes often share a cgroup, and all of them one further up: a limit is charged for all below it.
    charged: dict[Path, int] = {}
    limits: dict[Path, cgroups.MemoryLimit] = {}
    for need in needs:
        for limit in cgroups.memory_limits(need.pid):
            limits[limit.path] = limit
            charged[limit.path] = charged.get(limit.path, 0) + need.size_bytes
    return found + [
        _limit_finding(limit, charged[path]) for path, limit in limits.items() if charged[path] > limit.available_bytes
    ]


def _limit_finding(limit: cgroups.MemoryLimit, needed_bytes: int) -> Finding:
    return facts.CGROUP_MEMORY.seen(
        f"{limit.path} is {format_bytes(limit.limit_bytes)}; the operation needs {format_bytes(needed_bytes)}",
        as_warning=not limit.is_hard,
        free=format_bytes(limit.available_bytes),
        missing=format_bytes(needed_bytes - limit.available_bytes),
        limit=limit.path.name,
    )
