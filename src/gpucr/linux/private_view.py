"""A private view of the machine's file systems: it shows what is there, and what is written stays in memory.

A process in a new mount namespace calls `show`. Every mount becomes read-only there, without access times. Over those
that hold certain files lies an overlay: what is opened for writing, made, removed, renamed or locked through it is a
copy in a tmpfs, or a mark there, and ends with the namespace. An overlay has inodes of its own, so a lock, a lease, a
named pipe or a bound socket in the view has nothing to do with the machine's (seen with Linux 6.18: flock(2) of a file
that is locked outside succeeds).

Imports stay few: a keeper loads this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import stat
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpucr.linux import libc, proc_text

MACHINE = "/.gpucr-machine"
"""Where the view has the machine's own mounts, read-only: CRIU opens files by their handles there."""

_MEMORY = "/dev/shm"  # noqa: S108 - every sandbox has its own; what lies there is not in the view
_SPECIAL = ("/dev/", "/proc/", "/sys/")
_OF_CRIU = ("/run/criu.kdat", "/tmp/criu")  # noqa: S108 - where CRIU keeps its findings about a kernel, and tries mounts
_HEAD_BYTES = 1 << 20  # CRIU reads as much of a program, for its build id (BUILD_ID_MAP_SIZE of CRIU 4.2)

_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18  # include/uapi/linux/mount.h
_MS_NOSUID, _MNT_DETACH = 2, 2
_ATTR_RDONLY, _ATTR_NOATIME, _ATTR_ATIME_MODES = 0x1, 0x10, 0x70  # MOUNT_ATTR_*
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR = struct.Struct("4Q")  # struct mount_attr: set, clear, propagation, user namespace
_MOUNT_SETATTR = 442  # the same on all architectures (since Linux 5.12)
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_mount_of_libc = libc.function(
    "mount", ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p
)
_umount2 = libc.function("umount2", ctypes.c_char_p, ctypes.c_int)
_syscall = libc.function("syscall", result=ctypes.c_long)


class Folder(NamedTuple):
    """A folder that is made in the view if it is missing. ``mode``: 12 bits."""

    path: str
    mode: int
    uid: int
    gid: int


class View(NamedTuple):  # not a dataclass: importing them makes a keeper start a third slower
    """What must be as in the machine, and may be changed. All paths are absolute.

    ``paths``: the mounts below which these are get an overlay. ``written``: plain files that will be opened for
    writing. The view has a copy of them from the start, of their size at that moment; of a large one only its first
    MiB, the rest is a hole: an overlay would copy all of it. ``folders``: outermost first. ``as_is``: files and folders
    that are the very ones of the machine, read-only.
    """

    paths: Sequence[str]
    written: Sequence[str]
    folders: Sequence[Folder]
    as_is: Sequence[str]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> View:
        """From what `asdict` has made of one, by way of JSON."""
        folders = [Folder(*each) for each in given["folders"]]
        return cls(given["paths"], given["written"], folders, given["as_is"])

    def asdict(self) -> dict[str, Any]:
        """For JSON."""
        return self._asdict()


def show(view: View) -> None:
    """Make it the calling process's root. In a new mount namespace of its own; needs CAP_SYS_ADMIN. Raises OSError."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _set_read_only("/")
    mounts = _visible_mounts()
    covered = _holding(mounts, (*view.paths, *_OF_CRIU))
    _mount("gpucr-view", _MEMORY, "tmpfs", _MS_NOSUID, "mode=0755")
    root = f"{_MEMORY}/root"
    os.mkdir(root)
    for number, point in enumerate(sorted(mounts)):
        target = root if point == "/" else root + point
        if point in covered:
            upper, work = f"{_MEMORY}/{number}", f"{_MEMORY}/{number}-work"
            os.mkdir(upper)
            os.mkdir(work)
            _like(point, upper)
            for path in view.written:
                if _point_of(mounts, path) == point:
                    _copy(path, point, upper)
            _overlay(point, upper, work, target)
        else:
            _mount(point, target, None, _MS_BIND)
    for path in map(os.path.realpath, view.as_is):
        _mount(path, root + path, None, _MS_BIND)
    for folder in view.folders:
        _make(root, folder)
    os.mkdir(root + MACHINE, 0o700)
    libc.check(
        _syscall(_PIVOT_ROOT[platform.machine()], os.fsencode(root), os.fsencode(root + MACHINE)), "pivot_root", root
    )
    os.chdir("/")
    libc.check(
        _umount2(os.fsencode(MACHINE + _MEMORY), _MNT_DETACH), "umount2", _MEMORY
    )  # the overlays keep what they need of it


# --- which mounts -----------------------------------------------------------------------------------------------------


def _visible_mounts() -> frozenset[str]:
    """The points of the mounts that no other one hides, apart from those of shared memory."""
    known = {mount.number: mount.point for mount in proc_text.mounts()}
    found: set[str] = set()
    for point in {*known.values()}:
        if f"{point}/".startswith(f"{_MEMORY}/"):
            continue
        with contextlib.suppress(OSError):  # it is below one that hides it, or its server is gone
            fd = os.open(point, os.O_PATH | os.O_CLOEXEC)
            try:
                if known.get(_mount_number(fd)) == point:
                    found.add(point)
            finally:
                os.close(fd)
    return frozenset(found)


def _mount_number(fd: int) -> int:
    fields = dict(line.split(":", 1) for line in proc_text.lines(f"/proc/self/fdinfo/{fd}"))
    return int(fields["mnt_id"])


def _holding(mounts: Collection[str], paths: Iterable[str]) -> frozenset[str]:
    """The points of the mounts that hold these paths and can have an overlay. The root's is always one of them."""
    points = {_point_of(mounts, path) for path in paths if not f"{path}/".startswith(_SPECIAL)}
    return frozenset({"/", *(point for point in points if os.path.isdir(point))})


def _point_of(mounts: Collection[str], path: str) -> str:
    while path not in mounts and path != "/":
        path = os.path.dirname(path)
    return path


# --- what lies over them ----------------------------------------------------------------------------------------------


def _overlay(lower: str, upper: str, work: str, target: str) -> None:
    """The folders are named by descriptors: a name may have any character, and the options have a syntax."""
    fds = [os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) for path in (lower, upper, work)]
    try:
        names = [f"{option}=/proc/self/fd/{fd}" for option, fd in zip(("lowerdir", "upperdir", "workdir"), fds)]  # noqa: B905 - three each
        _mount("gpucr-view", target, "overlay", 0, ",".join(names))
    except OSError as e:
        raise OSError(e.errno, os.strerror(e.errno or 0), f"an overlay of {lower}") from e
    finally:
        for fd in fds:
            os.close(fd)


def _copy(path: str, point: str, upper: str) -> None:
    """Put this file into an upper folder, with the folders above it. One behind a link, or that is no file, is left."""
    start = len(point.rstrip("/"))
    above, names = upper, path[start:].strip("/").split("/")
    original = path[:start]
    try:
        for name in names[:-1]:
            original, above = f"{original}/{name}", f"{above}/{name}"
            if not stat.S_ISDIR(os.lstat(original).st_mode):
                return
            if not os.path.isdir(above):
                os.mkdir(above)
                _like(original, above)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # missing, or a link: CRIU will say so
        return
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or os.path.lexists(f"{above}/{names[-1]}"):
            return
        with open(f"{above}/{names[-1]}", "xb") as copy:
            copy.write(file.read(min(_HEAD_BYTES, status.st_size)))
            copy.truncate(status.st_size)
    _like(path, f"{above}/{names[-1]}")


def _like(original: str, made: str) -> None:
    """Give it the owner, mode and times of the other."""
    status = os.stat(original)
    os.chown(made, status.st_uid, status.st_gid)
    os.chmod(made, stat.S_IMODE(status.st_mode))
    os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))


def _make(root: str, folder: Folder) -> None:
    made = root + folder.path
    try:
        os.mkdir(made, 0o700)
    except FileExistsError:
        return
    os.chown(made, folder.uid, folder.gid)
    os.chmod(made, folder.mode)


# --- system calls -----------------------------------------------------------------------------------------------------


def _set_read_only(path: str) -> None:
    attributes = _MOUNT_ATTR.pack(_ATTR_RDONLY | _ATTR_NOATIME, _ATTR_ATIME_MODES, 0, 0)
    result = _syscall(
        _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))
    )
    libc.check(result, "mount_setattr", path)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    libc.check(_mount_of_libc(words[0], words[1], words[2], flags, words[3]), "mount", target)
