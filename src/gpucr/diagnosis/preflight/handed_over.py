"""Device memory that the driver hands over: what cannot be undone of that, said before it begins."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.linux import memory
from gpucr.quantities import counted, format_bytes


def check_handed_over(pids: Collection[int]) -> list[Finding]:
    """Of processes whose memory goes through the driver's custom storage. None of them: nothing."""
    if not pids:
        return []
    return [
        Finding(
            "warning",
            f"device memory of {counted(len(pids), 'process')} leaves by the driver's custom storage",
            "the driver has it, and gpucr has tried it on a simulated driver only",
            "what the driver has begun cannot be called off: gpucr brings the job back when it fails or is killed, but "
            "where the carrier, the process that the driver handed the memory to, is killed meanwhile they are ended",
            "`--gpu-state captured` goes through the driver's staging, which is slower and has run on hardware",
        )
    ]


def check_spool(folder: Path, size_bytes: int, why_not: str | None, target: Path | None = None) -> list[Finding]:
    """Device memory for which host memory has no room, and which goes to this folder, or cannot (``why_not``).

    ``target``: a folder on the file system of the snapshot, which needs room beside it.
    """
    if why_not is not None:
        return [
            Finding(
                "blocking",
                f"neither host memory nor a disk has room for {format_bytes(size_bytes)} of device memory",
                f"{format_bytes(memory.available_bytes())} of host memory are available; {why_not}",
                "what the driver hands over has to be somewhere until it is saved",
                "free host memory, or name a folder on a larger disk with TMPDIR; dumps into a folder need neither",
                code="GPUCR-HOST-MEMORY",
            )
        ]
    found = [
        Finding(
            "warning",
            f"{format_bytes(size_bytes)} of device memory go through an unencrypted file in {folder}",
            f"{format_bytes(memory.available_bytes())} of host memory are available, which is too little",
            "the job stands still for as long as that disk needs; the file has no name, and is gone when all is saved",
            "free host memory, or name a folder on a faster, or an encrypted, disk with TMPDIR",
        )
    ]
    if target is not None and folder.stat().st_dev == target.stat().st_dev:
        missing = 2 * size_bytes - memory.free_disk_bytes(folder)
        if missing > 0:
            found.append(
                Finding(
                    "warning",
                    f"{folder} and {target} are on one disk",
                    f"it has {format_bytes(memory.free_disk_bytes(folder))} free, and both take up to "
                    f"{format_bytes(2 * size_bytes)} of device memory",
                    f"where the store saves less than {format_bytes(missing)} of it, the dump fails, and is undone",
                    "free some space, or name a folder on another disk with TMPDIR",
                    code="GPUCR-NO-SPACE",
                )
            )
    return found
