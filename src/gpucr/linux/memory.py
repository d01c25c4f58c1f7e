"""A process's memory maps and the machine's memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpucr.linux.processes import PROC
from gpucr.model import Extent


@dataclass(frozen=True)
class Mapping:
    """One line of ``/proc/PID/maps`` (proc_pid_maps(5)). ``inode`` is 0 for anonymous memory."""

    start: int
    end: int
    permissions: str
    inode: int
    path: str

    @property
    def is_private_anonymous(self) -> bool:
        """Readable and writable private memory without a file: what malloc and the driver's staging use."""
        return self.permissions == "rw-p" and self.inode == 0 and not self.path


def read_maps(pid: int) -> tuple[Mapping, ...]:
    """All mappings of a process. Needs ptrace access to it; raises OSError where it ended."""
    found: list[Mapping] = []
    for line in (PROC / str(pid) / "maps").read_text(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        start, _, end = fields[0].partition("-")
        path = fields[5] if len(fields) > 5 else ""
        found.append(Mapping(int(start, 16), int(end, 16), fields[1], int(fields[4]), path))
    return tuple(found)


def has_mapped(pid: int, name: str) -> bool:
    """Whether a file whose path contains ``name`` is mapped. False where the process has ended."""
    try:
        return any(name in mapping.path for mapping in read_maps(pid))
    except (FileNotFoundError, ProcessLookupError):
        return False


def new_anonymous_ranges(before: tuple[Mapping, ...], after: tuple[Mapping, ...]) -> tuple[Extent, ...]:
    """The private anonymous ``rw-p`` address ranges that ``after`` has and ``before`` had not.

    Ranges are compared, not lines: the kernel merges a new mapping with a neighbour of the same kind.
    """
    known = [(m.start, m.end) for m in before if m.is_private_anonymous]
    found: list[Extent] = []
    for mapping in after:
        if not mapping.is_private_anonymous:
            continue
        position = mapping.start
        for start, end in known:
            if end <= position or start >= mapping.end:
                continue
            if start > position:
                found.append(Extent(position, start - position))
            position = max(position, end)
        if position < mapping.end:
            found.append(Extent(position, mapping.end - position))
    return tuple(found)


def largest_anonymous_bytes(pid: int) -> int:
    """The size of the largest private anonymous ``rw-p`` mapping (0 where there is none)."""
    return max((m.end - m.start for m in read_maps(pid) if m.is_private_anonymous), default=0)


def resident_bytes(pid: int) -> int:
    """The process's resident memory in bytes (0 where it has ended)."""
    try:
        pages = int((PROC / str(pid) / "statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Host memory that new allocations can have without swapping (MemAvailable of /proc/meminfo)."""
    for line in (PROC / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable line")


def free_disk_bytes(folder: Path) -> int:
    """Bytes that the caller can still write to the file system of this folder."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
