"""What several trees of one job share and would lose: CRIU dumps each tree separately."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import processes as facts
from gpucr.linux import memory, processes
from gpucr.linux.processes import PROC
from gpucr.model import Job, ProcessInfo

_NAMELESS = " (deleted)"
"""What the kernel appends to names of unnamed shared memory and files. Named ones are reopened."""

_READ, _WRITTEN = 0o400, 0o200  # the mode of a link in /proc/PID/fd


def check_between_trees(job: Job, remedy: str) -> list[Finding]:
    """Pipes between trees, sockets open in two trees, and unnamed memory and files that they share.

    A pipe that leads out of the job is also lost with a single tree. CRIU itself detects connected local sockets: it
    dumps none whose peer is elsewhere. ``remedy``: what to do instead.
    """
    found: list[Finding] = []
    owners: dict[str, ProcessInfo] = {}
    for tree in job.trees:
        mine: dict[str, ProcessInfo] = {}
        for process in tree.processes:
            for name, others in _shared(process):
                mine.setdefault(name, process)
                other = next((owners[each] for each in others if each in owners), None)
                if other is not None:
                    found.append(_finding(process, other, name, remedy))
        owners |= {name: process for name, process in mine.items() if name not in owners}
    return found


def _shared(process: ProcessInfo) -> Iterator[tuple[str, tuple[str, ...]]]:
    """This process's shared objects, and how their other ends would look."""
    folder = PROC / str(process.pid)
    # Missing entries belong to ended processes.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for file in processes.open_files(process.pid):
            if file.target.startswith("pipe:["):
                mode = os.lstat(folder / "fd" / str(file.fd)).st_mode
                ends = ("read", mode & _READ), ("written", mode & _WRITTEN)
                for (end, is_mine), (other_end, _) in zip(ends, reversed(ends), strict=True):
                    if is_mine:
                        yield f"{file.target} ({end})", (f"{file.target} ({other_end})",)
            elif file.target.startswith("socket:["):
                yield file.target, (file.target,)
            elif file.target.endswith(_NAMELESS):
                yield _named(file.target, os.stat(folder / "fd" / str(file.fd)).st_ino)
        for mapping in memory.read_maps(process.pid):
            if mapping.permissions.endswith("s") and mapping.path.endswith(_NAMELESS):
                yield _named(mapping.path, mapping.inode)


def _named(path: str, inode: int) -> tuple[str, tuple[str]]:
    name = f"{path.removesuffix(_NAMELESS)}, which has no name, with inode {inode}"
    return name, (name,)


def _finding(process: ProcessInfo, other: ProcessInfo, name: str, remedy: str) -> Finding:
    return facts.TREES_SHARE.seen(
        name,
        process.pid,
        processes=f"processes {other.pid} ({other.name}) and {process.pid} ({process.name})",
        how_to_dump_one_tree=remedy,
    )
