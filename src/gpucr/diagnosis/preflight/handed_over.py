"""Warn before the driver hands device memory over, which cannot be undone."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import gpu_use, machine
from gpucr.linux import memory
from gpucr.quantities import counted, format_bytes


def check_handed_over(pids: Collection[int]) -> list[Finding]:
    """Findings about processes whose memory goes through the driver's custom storage."""
    if not pids:
        return []
    return [
        gpu_use.CUSTOM_STORAGE.seen(
            "the driver has it, and gpucr has tried it on a simulated driver only",
            processes=counted(len(pids), "process"),
        )
    ]


def check_spool(folder: Path, size_bytes: int, why_not: str | None, target: Path | None = None) -> list[Finding]:
    """Device memory that does not fit into host memory, and goes to this folder, or cannot (``why_not``).

    ``target``: a folder on the file system of the snapshot, which needs room beside it.
    """
    size = format_bytes(size_bytes)
    available = f"{format_bytes(memory.available_bytes())} of host memory are available"
    if why_not is not None:
        return [machine.NO_ROOM_TO_HAND_OVER.seen(f"{available}; {why_not}", size=size)]
    found = [machine.SPOOL.seen(f"{available}, which is too little", size=size, folder=folder)]
    if target is not None and folder.stat().st_dev == target.stat().st_dev:
        missing = 2 * size_bytes - memory.free_disk_bytes(folder)
        if missing > 0:
            found.append(
                machine.SPOOL_BESIDE_TARGET.seen(
                    f"it has {format_bytes(memory.free_disk_bytes(folder))} free, and both take up to "
                    f"{format_bytes(2 * size_bytes)} of device memory",
                    folder=folder,
                    target=target,
                    missing=format_bytes(missing),
                )
            )
    return found
