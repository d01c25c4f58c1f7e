"""Regular files that processes have open or mapped, by name and by inode."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator

from msgspec import Struct

from gpucr.linux import proc_text
from gpucr.linux.processes import PROC, all_pids

_GONE = " (deleted)"
Inode = tuple[int, int]
"""Device and inode number, which identify a file regardless of its path."""


class FileInUse(Struct, frozen=True):
    """A regular file that still has a name, as one descriptor or mapping of a process shows it.

    ``path`` is the kernel's, in the process's own mount namespace; it ends in `` (deleted)`` if that name is gone.
    ``is_written``: opened for writing, or mapped shared and writable.
    """

    path: str
    inode: Inode
    size_bytes: int
    is_written: bool
    is_mapped: bool


def files_in_use(pids: Iterable[int]) -> Iterator[FileInUse]:
    """The regular files that these processes have open or mapped, unordered, possibly with duplicates.

    Processes of a job map the same libraries hundreds of times; each is looked up once. Without CAP_SYS_ADMIN or
    CAP_CHECKPOINT_RESTORE a mapped file is found only if its path still leads to it. A process that ends meanwhile has
    none. Raises PermissionError if the caller may not look into a process.
    """
    seen: set[tuple[str, bool]] = set()
    for pid in pids:
        for path in _entries(f"{PROC}/{pid}/fd"):
            found = _look(path)
            if found is not None:
                target, status = found
                yield _in_use(target, status, is_written=_is_open_for_writing(path), is_mapped=False)
        for mapping in _mappings(pid):
            is_shared_and_writable = mapping.is_shared_and_writable
            if (mapping.key, is_shared_and_writable) in seen:
                continue
            seen.add((mapping.key, is_shared_and_writable))
            found = _look_at_mapped(pid, mapping)
            if found is not None:
                target, status = found
                yield _in_use(target, status, is_written=is_shared_and_writable, is_mapped=True)


def linked_files(pid: int) -> Iterator[FileInUse]:
    """Those of `files_in_use` whose opened name is gone while another one is left: few of many, so they are sought.

    Raises as `files_in_use`.
    """
    for path in _entries(f"{PROC}/{pid}/fd"):
        if _is_gone(path) and (found := _look(path)) is not None:
            yield _in_use(*found, is_written=_is_open_for_writing(path), is_mapped=False)
    for mapping in _mappings(pid, with_part=_GONE):
        if (found := _look_at_mapped(pid, mapping)) is not None:
            yield _in_use(*found, is_written=mapping.is_shared_and_writable, is_mapped=True)


def _is_gone(link: str) -> bool:
    try:
        return os.readlink(link).endswith(_GONE)
    except (FileNotFoundError, ProcessLookupError):
        return False


def holders(inodes: Collection[Inode], *, apart_from: Collection[int] = ()) -> dict[Inode, int]:
    """For each of these files that is in use: one process that has it open or mapped.

    Processes that the caller may not look into are skipped. Mapped files are identified by their device number in
    ``/proc/PID/maps``, which matches stat(2) on a tmpfs, though not on every file system.
    """
    found: dict[Inode, int] = {}
    wanted = {f"{os.major(device):02x}:{os.minor(device):02x} {inode}": (device, inode) for device, inode in inodes}
    for pid in all_pids():
        if pid in apart_from or pid == os.getpid():
            continue
        with contextlib.suppress(PermissionError):
            for path in _entries(f"{PROC}/{pid}/fd"):
                status = _stat(path)
                if status is not None and (status.st_dev, status.st_ino) in inodes:
                    found.setdefault((status.st_dev, status.st_ino), pid)
            for mapping in _mappings(pid):
                if mapping.key in wanted:
                    found.setdefault(wanted[mapping.key], pid)
    return found


def _entries(folder: str) -> list[str]:
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except (FileNotFoundError, ProcessLookupError):
        return []


class _Mapping(Struct, frozen=True):
    """A mapping of a file. ``key``: ``device inode``, as ``maps`` writes it."""

    address_range: str
    is_shared_and_writable: bool
    key: str
    path: str

    @property
    def inode_number(self) -> int:
        """The file's inode number, without its device."""
        return int(self.key.split()[1])


def _mappings(pid: int, *, with_part: str = "") -> Iterator[_Mapping]:
    """``with_part``: only lines with it."""
    try:
        lines = proc_text.lines(f"{PROC}/{pid}/maps", errors="surrogateescape")
    except (FileNotFoundError, ProcessLookupError):
        return
    for line in lines if not with_part else [line for line in lines if with_part in line]:
        fields = line.split(maxsplit=5)
        if len(fields) >= 5 and fields[4] != "0":
            is_shared_and_writable = fields[1][1] == "w" and fields[1][3] == "s"
            path = fields[5] if len(fields) == 6 else ""
            yield _Mapping(fields[0], is_shared_and_writable, f"{fields[3]} {fields[4]}", path)


def _look_at_mapped(pid: int, mapping: _Mapping) -> tuple[str, os.stat_result] | None:
    try:
        return _look(f"{PROC}/{pid}/map_files/{_map_file_name(mapping.address_range)}")
    except PermissionError:
        # Only the path remains. The device is not compared: maps and stat(2) report it differently on some file
        # systems.
        status = _stat(f"{PROC}/{pid}/root{mapping.path}") if mapping.path.startswith("/") else None
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_ino != mapping.inode_number:
        return None
    return mapping.path, status


def _look(link: str) -> tuple[str, os.stat_result] | None:
    """The target of the /proc link, if that is a regular file with a name."""
    status = _stat(link)
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_nlink == 0:
        return None
    try:
        target = os.readlink(link)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return (target, status) if target.startswith("/") else None


def _stat(link: str) -> os.stat_result | None:
    try:
        return os.stat(link)
    except PermissionError:
        raise
    except OSError:  # closed meanwhile, or its file system is gone
        return None


def _in_use(target: str, status: os.stat_result, *, is_written: bool, is_mapped: bool) -> FileInUse:
    return FileInUse(target, (status.st_dev, status.st_ino), status.st_size, is_written, is_mapped)


def _is_open_for_writing(link: str) -> bool:
    """``link``: of the descriptor, in ``/proc/PID/fd``."""
    try:
        lines = proc_text.lines(link.replace("/fd/", "/fdinfo/"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    flags = next((int(line.split()[1], 8) for line in lines if line.startswith("flags:")), os.O_RDONLY)
    return flags & os.O_ACCMODE != os.O_RDONLY


def _map_file_name(address_range: str) -> str:
    """`maps` pads addresses with zeros, `map_files` does not."""
    return "-".join(f"{int(address, 16):x}" for address in address_range.split("-"))
