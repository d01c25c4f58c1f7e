"""Regular files that processes have open or mapped, by name and by inode."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator

from msgspec import Struct

from gpucr.linux import proc_text
from gpucr.linux.descriptor_scan import NAMELESS
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import PROC, OpenFile, all_pids

_MAPPING = re.compile(rb"^([0-9a-f]+-[0-9a-f]+) .(.).(.) [0-9a-f]+ ([0-9a-f:]+) ([1-9]\d*) *(\S.*)?$", re.MULTILINE)
"""A line of ``maps`` about a file: addresses, whether it can be written, whether it is shared, device, inode, path."""
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


def files_in_use(pids: Iterable[int], look: OneLook | None = None) -> Iterator[FileInUse]:
    """The regular files that these processes have open or mapped, unordered, possibly with duplicates.

    Processes of a job map the same libraries hundreds of times; each is looked up once. Without CAP_SYS_ADMIN or
    CAP_CHECKPOINT_RESTORE a mapped file is found only if its path still leads to it. A process that ends meanwhile has
    none. Raises PermissionError if the caller may not look into a process.
    """
    look = look or OneLook()
    seen: set[tuple[bytes, ...]] = set()
    for pid in pids:
        for file in look.files(pid):
            if (in_use := _opened(file, look)) is not None:
                yield in_use
        for mapping in _mappings(pid, seen):
            found = _look_at_mapped(pid, mapping)
            if found is not None:
                yield _in_use(*found, is_written=mapping.is_shared_and_writable, is_mapped=True)


def linked_files(pid: int, look: OneLook) -> Iterator[FileInUse]:
    """Those of `files_in_use` whose opened name is gone while another one is left: few of many, so they are sought.

    Raises as `files_in_use`.
    """
    for file in look.files(pid):
        if file.target.endswith(NAMELESS) and (in_use := _opened(file, look)) is not None:
            yield in_use
    try:
        lines = look.mapped(pid).passing
    except (FileNotFoundError, ProcessLookupError):
        return
    for mapping in _mappings_in("\n".join(lines).encode(errors="surrogateescape"), set()):
        if mapping.path.endswith(NAMELESS) and (found := _look_at_mapped(pid, mapping)) is not None:
            yield _in_use(*found, is_written=mapping.is_shared_and_writable, is_mapped=True)


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
            for mapping in _mappings(pid, set()):
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


def _mappings(pid: int, seen: set[tuple[bytes, ...]]) -> Iterator[_Mapping]:
    """One of each file, for each way to map it, that is not in ``seen``; adds them to it."""
    try:
        maps = proc_text.read(f"{PROC}/{pid}/maps")
    except (FileNotFoundError, ProcessLookupError):
        return
    yield from _mappings_in(maps, seen)


def _mappings_in(maps: bytes, seen: set[tuple[bytes, ...]]) -> Iterator[_Mapping]:
    for address_range, *way, path in _MAPPING.findall(maps):
        if (key := tuple(way)) not in seen:
            seen.add(key)
            write, share, device, inode = way
            key_text = f"{device.decode()} {inode.decode()}"
            yield _Mapping(address_range.decode(), write + share == b"ws", key_text, os.fsdecode(path))


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


def _opened(file: OpenFile, look: OneLook) -> FileInUse | None:
    """What the descriptor has open, if that is a regular file with a name. Raises PermissionError."""
    status = look.opened(file)
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_nlink == 0 or not file.target.startswith("/"):
        return None
    return _in_use(file.target, status, is_written=_is_open_for_writing(file), is_mapped=False)


def _is_open_for_writing(file: OpenFile) -> bool:
    """The mode of the link says so (proc_pid_fd(5))."""
    try:
        return bool(os.lstat(f"{PROC}/{file.pid}/fd/{file.fd}").st_mode & stat.S_IWUSR)
    except (FileNotFoundError, ProcessLookupError):
        return False


def _map_file_name(address_range: str) -> str:
    """`maps` pads addresses with zeros, `map_files` does not."""
    return "-".join(f"{int(address, 16):x}" for address in address_range.split("-"))
