"""Regular files that processes have open or mapped, by name and by inode."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from gpucr.linux import proc_text
from gpucr.linux.processes import PROC, all_pids

_DELETED = " (deleted)"

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
        for path in _entries(PROC / str(pid) / "fd"):
            found = _look(path)
            if found is not None:
                target, status = found
                yield _in_use(target, status, is_written=_is_open_for_writing(pid, path.name), is_mapped=False)
        for mapping in _mappings(pid):
            is_shared_and_writable = mapping.is_shared_and_writable
            if (mapping.key, is_shared_and_writable) in seen:
                continue
            seen.add((mapping.key, is_shared_and_writable))
            found = _look_at_mapped(pid, mapping)
            if found is not None:
                target, status = found
                yield _in_use(target, status, is_written=is_shared_and_writable, is_mapped=True)


def nameless_files(pids: Iterable[int]) -> Iterator[tuple[str, Inode]]:
    """The files of `files_in_use` that have lost the name with which they are used: that path, and the inode."""
    for pid in pids:
        links = _entries(PROC / str(pid) / "fd")
        lost = (each for each in _mappings(pid) if each.path.endswith(_DELETED))
        links += (PROC / str(pid) / "map_files" / _map_file_name(each.address_range) for each in lost)
        for link in links:
            with contextlib.suppress(PermissionError):
                if (found := _look(link)) is not None and found[0].endswith(_DELETED):
                    yield found[0].removesuffix(_DELETED), (found[1].st_dev, found[1].st_ino)


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
            for path in _entries(PROC / str(pid) / "fd"):
                status = _stat(path)
                if status is not None and (status.st_dev, status.st_ino) in inodes:
                    found.setdefault((status.st_dev, status.st_ino), pid)
            for mapping in _mappings(pid):
                if mapping.key in wanted:
                    found.setdefault(wanted[mapping.key], pid)
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in os.listdir(folder)]
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


def _mappings(pid: int) -> Iterator[_Mapping]:
    try:
        lines = proc_text.lines(PROC / str(pid) / "maps", errors="surrogateescape")
    except (FileNotFoundError, ProcessLookupError):
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) >= 5 and fields[4] != "0":
            is_shared_and_writable = fields[1][1] == "w" and fields[1][3] == "s"
            path = fields[5] if len(fields) == 6 else ""
            yield _Mapping(fields[0], is_shared_and_writable, f"{fields[3]} {fields[4]}", path)


def _look_at_mapped(pid: int, mapping: _Mapping) -> tuple[str, os.stat_result] | None:
    try:
        return _look(PROC / str(pid) / "map_files" / _map_file_name(mapping.address_range))
    except PermissionError:
        # Only the path remains. The device is not compared: maps and stat(2) report it differently on some file
        # systems.
        status = _stat(Path(f"{PROC}/{pid}/root{mapping.path}")) if mapping.path.startswith("/") else None
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_ino != mapping.inode_number:
        return None
    return mapping.path, status


def _look(link: Path) -> tuple[str, os.stat_result] | None:
    """The target of the /proc link, if that is a regular file with a name."""
    status = _stat(link)
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_nlink == 0:
        return None
    try:
        target = os.readlink(link)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return (target, status) if target.startswith("/") else None


def _stat(link: Path) -> os.stat_result | None:
    try:
        return link.stat()
    except PermissionError:
        raise
    except OSError:  # closed meanwhile, or its file system is gone
        return None


def _in_use(target: str, status: os.stat_result, *, is_written: bool, is_mapped: bool) -> FileInUse:
    return FileInUse(target, (status.st_dev, status.st_ino), status.st_size, is_written, is_mapped)


def _is_open_for_writing(pid: int, fd: str) -> bool:
    try:
        lines = proc_text.lines(PROC / str(pid) / "fdinfo" / fd)
    except (FileNotFoundError, ProcessLookupError):
        return False
    flags = next((int(line.split()[1], 8) for line in lines if line.startswith("flags:")), os.O_RDONLY)
    return flags & os.O_ACCMODE != os.O_RDONLY


def _map_file_name(address_range: str) -> str:
    """`maps` pads addresses with zeros, `map_files` does not."""
    return "-".join(f"{int(address, 16):x}" for address in address_range.split("-"))
