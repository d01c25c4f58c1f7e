"""The file system where snapshots would go."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from gpucr.checkups import catalogue
from gpucr.checkups.checkup import ok
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.linux import memory
from gpucr.model import Gpu
from gpucr.quantities import format_bytes

_ABOUT = "disk"


class StorageFacts(Struct, frozen=True):
    """``problem``: why nothing can be written there (None: it can).

    ``is_direct``: whether files can bypass the page cache (O_DIRECT). ``was_named``: by the user; otherwise it is the
    current folder.
    """

    folder: Path
    problem: str | None
    free_bytes: int
    is_memory: bool
    is_direct: bool
    device_used_bytes: int
    was_named: bool


def look(folder: Path, gpus: Sequence[Gpu], *, was_named: bool) -> StorageFacts:
    """Query a folder's file system, and open an unnamed file there, closed at once."""
    problem, is_direct = _try(folder)
    return StorageFacts(
        folder=folder,
        problem=problem,
        free_bytes=memory.free_disk_bytes(folder),
        is_memory=memory.lies_in_memory(folder),
        is_direct=is_direct,
        device_used_bytes=sum(gpu.memory_total_bytes - gpu.memory_free_bytes for gpu in gpus),
        was_named=was_named,
    )


def check(facts: StorageFacts) -> list[Finding]:
    """Whether a snapshot can be written there, whether it fits, and how fast."""
    if facts.problem is not None:
        return [catalogue.NOT_WRITABLE.seen(facts.problem, as_warning=not facts.was_named, folder=facts.folder)]
    return [_space(facts), *_way(facts)]


def _space(facts: StorageFacts) -> Finding:
    what = f"{facts.folder} has {format_bytes(facts.free_bytes)} free"
    evidence = f"statvfs; {format_bytes(facts.device_used_bytes)} of device memory are in use on all GPUs"
    if facts.free_bytes >= facts.device_used_bytes:
        return ok(_ABOUT, what, evidence)
    return catalogue.LITTLE_DISK.seen(evidence, folder=facts.folder, size=format_bytes(facts.free_bytes))


def _way(facts: StorageFacts) -> list[Finding]:
    if facts.is_memory:
        return [catalogue.PLACE_IN_MEMORY.seen("statfs: tmpfs or ramfs", folder=facts.folder)]
    if not facts.is_direct:
        return [catalogue.THROUGH_PAGE_CACHE.seen("the file system refuses O_DIRECT", folder=facts.folder)]
    return [ok(_ABOUT, "files there can bypass the page cache", "O_DIRECT")]


def _try(folder: Path) -> tuple[str | None, bool]:
    """Why nothing can be written there, and whether O_DIRECT works."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError:
        return _why_not_writable(folder), False
    return None, True


def _why_not_writable(folder: Path) -> str | None:
    try:
        is_read_only = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    except OSError as e:
        return f"{e.strerror or e}"
    if is_read_only:
        return "its file system is mounted read-only"
    return None if os.access(folder, os.W_OK | os.X_OK, effective_ids=True) else "this user may not write there"
