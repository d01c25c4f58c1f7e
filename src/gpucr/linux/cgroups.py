"""How cgroups limit a process: how much memory it can still get, which CPUs it may use, and whether it is frozen.

Sources: cgroups(7); the kernel's cgroup-v2.rst, cgroup-v1/memory.rst and cgroup-v1/freezer-subsystem.rst. A cgroup that
exceeds its limit gets no error: the kernel kills one of its processes, even for pages of files in memory. So check
before allocating much.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

from msgspec import Struct

from gpucr.linux import proc_text
from gpucr.linux.processes import PROC

_NO_LIMIT_BYTES = 1 << 62  # cgroup v1 writes "none" as the largest multiple of a page below 2^63
_FREEZE = "cgroup.freeze"
_ESCAPED = re.compile(r"\\([0-7]{3})")

# What the kernel reclaims before it kills anyone, which MemAvailable counts for the whole machine: the page cache of
# files, active or not (a data set read every epoch is active), and slab caches. Files in memory (tmpfs) are on the
# anonymous lists, which can only be swapped. Version 1 has no field for slabs; its "total_" fields include the cgroups
# below, as its usage does.
_RECLAIMABLE: dict[Literal[1, 2], tuple[str, ...]] = {
    1: ("total_active_file", "total_inactive_file"),
    2: ("active_file", "inactive_file", "slab_reclaimable"),
}


class MemoryLimit(Struct, frozen=True):
    """One limit of one cgroup. ``path`` is the file that sets it.

    ``is_hard``: the kernel kills beyond it. Otherwise (memory.high) it throttles the processes almost to a standstill.
    ``available_bytes``: what can still be allocated after the kernel has reclaimed everything it can.
    """

    path: Path
    limit_bytes: int
    available_bytes: int
    is_hard: bool


def join(pid: int) -> None:
    """Move the caller into this process's cgroup, in each hierarchy where they differ. Needs root. Raises OSError."""
    own, wanted = (_lines_of(name) for name in ("self", str(pid)))
    for line in sorted(set(wanted) - set(own)):
        hierarchy, controllers, path = line.split(":", maxsplit=2)
        version = 2 if hierarchy == "0" else 1
        for found, (root, top) in _mounts(controllers.split(",")[0]):
            below = _below(PurePosixPath(path), root)
            if found == version and below is not None:
                (top / below / "cgroup.procs").write_text("0")  # the writer
                break
        else:
            raise OSError(errno.ENOENT, "this part of the hierarchy is not mounted", path)


def memory_limits(pid: int | None = None) -> tuple[MemoryLimit, ...]:
    """The limits that apply to a process (None: the caller): those of its cgroup and all above it.

    Only mounted cgroups are seen: not the limits above a container's own cgroup namespace, nor those of a cgroup
    outside of it. Empty if the process has ended.
    """
    found: list[MemoryLimit] = []
    for version, level in _levels(pid, "memory"):
        found.extend(_limits_of(level, version))
    return tuple(found)


def _levels(pid: int | None, controller: str) -> Iterator[tuple[Literal[1, 2], Path]]:
    """The folders of the process's cgroup and of all above it, with the version, from the inside out."""
    for version, folder, top in _cgroups_of(pid, controller):
        levels = [folder, *folder.parents]
        for level in levels[: levels.index(top) + 1]:
            yield version, level


def _cgroups_of(pid: int | None, controller: str) -> Iterator[tuple[Literal[1, 2], Path, Path]]:
    """(version, the process's folder, the folder where that hierarchy is mounted), at most one per version.

    A hybrid machine has both versions; the one without the controller has none of its files.
    """
    try:
        lines = _lines_of("self" if pid is None else str(pid))
    except (FileNotFoundError, ProcessLookupError):
        return
    mounted: dict[Literal[1, 2], tuple[PurePosixPath, Path]] = {}
    for version, place in _mounts(controller):
        mounted.setdefault(version, place)  # the system's own; later mounts (CRIU's) may be gone before they are read
    for line in lines:
        hierarchy, controllers, path = line.split(":", maxsplit=2)
        if hierarchy == "0" and not controllers:
            version = 2
        elif controller in controllers.split(","):
            version = 1
        else:
            continue
        if version in mounted:
            root, top = mounted[version]
            below = _below(PurePosixPath(path), root)
            if below is not None:
                yield version, top / below, top


def _mounts(controller: str) -> Iterator[tuple[Literal[1, 2], tuple[PurePosixPath, Path]]]:
    """Where hierarchies that have (v1) or may have (v2) this controller are mounted, and which part of each."""
    for mount in proc_text.mounts(PROC / "self" / "mountinfo"):
        place = PurePosixPath(mount.root), Path(mount.point)
        if mount.kind == "cgroup2":
            yield 2, place
        elif mount.kind == "cgroup" and controller in mount.options.split(","):
            yield 1, place


def _lines_of(name: str) -> list[str]:
    return proc_text.lines(f"{PROC}/{name}/cgroup", errors="surrogateescape")


def _below(path: PurePosixPath, root: PurePosixPath) -> PurePosixPath | None:
    """``path`` seen from the mounted ``root``. None if it is outside the mount or our cgroup namespace."""
    if ".." in path.parts or not path.is_relative_to(root):
        return None
    return path.relative_to(root)


def _limits_of(folder: Path, version: Literal[1, 2]) -> Iterator[MemoryLimit]:
    files = [("memory.max", True), ("memory.high", False)] if version == 2 else [("memory.limit_in_bytes", True)]
    for name, is_hard in files:
        limit_bytes = _read_number(folder / name)
        if limit_bytes is None:
            continue
        used_bytes = _read_number(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")) or 0
        unreclaimable_bytes = max(0, used_bytes - _reclaimable_bytes(folder, version))
        yield MemoryLimit(folder / name, limit_bytes, max(0, limit_bytes - unreclaimable_bytes), is_hard)


def name_of(pid: int) -> tuple[str, ...]:
    """What distinguishes the cgroup of a process from others: the kernel's lines about it. Raises OSError."""
    return tuple(_lines_of(str(pid)))


def assigned_cpus(pid: int) -> str | None:
    """The CPUs of a process's cgroup (cpuset), as the kernel lists them; None if there is no such limit."""
    for version, level in _levels(pid, "cpuset"):
        with contextlib.suppress(OSError):  # in version 2 only some levels have the file
            name = "cpuset.cpus.effective" if version == 2 else "cpuset.effective_cpus"
            if cpus := (level / name).read_text().strip():
                return cpus
    return None


def unit_of(pid: int) -> str | None:
    """The systemd unit (service or scope) that a process runs in, as a cgroup path; None if there is none."""
    return next(iter(units_of([pid])), None)


def units_of(pids: Iterable[int]) -> set[str]:
    """Those of these processes, which are in few cgroups as a rule."""
    found: set[tuple[str, ...]] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.add(name_of(pid))
    return {unit for lines in found if (unit := _unit_in(lines)) is not None}


def _unit_in(lines: Iterable[str]) -> str | None:
    paths = {controllers: path for _, controllers, path in (line.split(":", maxsplit=2) for line in lines)}
    parts = PurePosixPath(paths.get("name=systemd", paths.get("", "/"))).parts
    inner = [depth for depth, part in enumerate(parts, 1) if part.endswith((".service", ".scope"))]
    return str(PurePosixPath(*parts[: inner[-1]])) if inner else None


def pids_in(folder: str) -> tuple[int, ...]:
    """The processes in this cgroup and in those below it.

    A process of another pid namespace, which has no pid here, is 0. Raises OSError; NotADirectoryError also if the
    folder is not a cgroup.
    """
    path = Path(os.path.realpath(folder, strict=True))
    devices = {path.stat().st_dev for path in _hierarchies()}
    if path.stat().st_dev not in devices:
        raise NotADirectoryError(errno.ENOTDIR, "not the folder of a cgroup", folder)
    found = _pids_of(path)
    for level, names, _ in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile; or threaded: an upper level lists its processes
                found |= _pids_of(Path(level, name))
    return tuple(sorted(found))


def _pids_of(folder: Path) -> set[int]:
    return set(map(int, (folder / "cgroup.procs").read_text().split()))


def _hierarchies() -> Iterator[Path]:
    """Mount points of cgroup file systems, of either version and any controller."""
    return (
        Path(mount.point)
        for mount in proc_text.mounts(PROC / "self" / "mountinfo")
        if mount.kind in ("cgroup", "cgroup2")
    )


def _read_number(file: Path) -> int | None:
    """The number in a file of a cgroup; None for "max" and for a missing file (root, removed cgroup)."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and int(text) < _NO_LIMIT_BYTES else None


def _reclaimable_bytes(folder: Path, version: Literal[1, 2]) -> int:
    try:
        lines = proc_text.lines(folder / "memory.stat")
    except OSError:
        return 0
    stat = dict(line.split(maxsplit=1) for line in lines)
    return sum(int(stat.get(field, 0)) for field in _RECLAIMABLE[version])


def legacy_freezer(pid: int) -> str | None:
    """This process's own cgroup in version 1's freezer hierarchy; None if it has none."""
    try:
        lines = _lines_of(str(pid))
    except (FileNotFoundError, ProcessLookupError):
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "freezer" in controllers.split(",") and path != "/":
            return path
    return None


def frozen_by(pid: int) -> Path | None:
    """The cgroup whose freezer holds this process or is about to: its own or one above. None if none does.

    ``/proc/PID/stat`` does not show it: a process frozen by version 2 looks asleep there (seen with Linux 6.18).
    """
    for version, level in _levels(pid, "freezer"):
        if _read_number(level / (_FREEZE if version == 2 else "freezer.self_freezing")) == 1:
            return level
    return None


def thaw(cgroup: Path) -> None:
    """FROZEN → thawed, for a version 2 cgroup. Needs write access. Raises OSError."""
    (cgroup / _FREEZE).write_text("0")


def freeze(cgroup: Path) -> None:
    """Thawed → FROZEN, or about to be, for a version 2 cgroup. Needs write access. Raises OSError."""
    (cgroup / _FREEZE).write_text("1")
