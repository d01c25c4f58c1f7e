"""In a chroot, make the caller's root folder the root of its mount namespace.

Whoever enters a mount namespace (setns(2)) gets that namespace's root. In a chroot without pivot_root(2) that is the
machine's root: CRIU and `gpucr exec` would see other files than the job (seen with Linux 6.18 and CRIU 4.2: "Can't open
dir /proc/1007/fd/3"). So a sandbox that is made in a chroot gets a copy of the mounts that are visible there, on top of
all others.

A chroot into a plain folder has no mount at its root. CRIU refuses every process there ("No parent found for mountpoint
150", seen with 4.2.1), but works in such a sandbox.

Imports stay few: a keeper loads this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterator
from typing import NoReturn

from gpucr.linux import libc, namespaces, proc_text

_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000  # include/uapi/linux/fcntl.h
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 1, 4  # include/uapi/linux/mount.h
_OPEN_TREE, _MOVE_MOUNT = 428, 429  # the same on all architectures (since Linux 5.2)

_FOLDER, _NOTES = os.O_PATH | os.O_DIRECTORY, "/proc/self/fdinfo"

_syscall = libc.function("syscall", result=ctypes.c_long)


def is_mounted() -> bool:
    """Whether the caller's root folder is a mount."""
    return any(mount.point == "/" for mount in proc_text.mounts())


def main(*command: str) -> NoReturn:
    """Become this command in a mount namespace whose root is the caller's. Needs what `take_own_root` needs."""
    namespaces.make_new("mnt")
    take_own_root()
    os.execv(command[0], command)  # noqa: S606 (an argument list, no shell)


def take_own_root() -> None:
    """In a new mount namespace: its root is the caller's root folder from now on, and it follows the machine's mounts.

    Later mounts of the machine arrive, but none is passed on (MS_SLAVE). The caller's process must have one thread.
    Needs CAP_SYS_ADMIN, and in a chroot CAP_SYS_CHROOT. Raises OSError.
    """
    with contextlib.ExitStack() as opened:

        def open_(path: str, flags: int = os.O_RDONLY) -> int:
            fd = os.open(path, flags | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            return fd

        own, here = open_("/proc/self/ns/mnt"), open_("/", _FOLDER)
        folder, notes = os.getcwd(), open_(_NOTES, _FOLDER)
        try:
            namespaces.enter(own, "mnt")  # which leaves the chroot
        except PermissionError:  # nothing can enter this namespace without CAP_SYS_CHROOT, so its root does not matter
            namespaces.follow_host_mounts()
            return
        namespaces.follow_host_mounts()
        top = open_("/", _FOLDER)
        if _place(here, notes) != _place(top, notes):
            tree = _call(_OPEN_TREE, here, b"", _OPEN_TREE_CLONE | _AT_EMPTY_PATH | _AT_RECURSIVE | os.O_CLOEXEC)
            opened.callback(os.close, tree)
            _call(_MOVE_MOUNT, tree, b"", _AT_FDCWD, b"/", _MOVE_MOUNT_F_EMPTY_PATH)
            namespaces.enter(own, "mnt")  # whose root is the topmost mount
        with contextlib.suppress(FileNotFoundError, PermissionError):  # removed meanwhile: then it is the root
            os.chdir(folder)


@contextlib.contextmanager
def of_process(pid: int) -> Iterator[tuple[int, bool]]:
    """A descriptor of the root folder of a process, and whether the caller's root is another, for a block.

    Needs ptrace access to it. Raises FileNotFoundError or ProcessLookupError if it has ended, PermissionError.
    """
    with contextlib.ExitStack() as opened:
        found: list[int] = []
        for path in (f"/proc/{pid}/root", "/", _NOTES):
            found.append(os.open(path, _FOLDER | os.O_CLOEXEC))
            opened.callback(os.close, found[-1])
        theirs, own, notes = found
        yield theirs, _place(theirs, notes) != _place(own, notes)


def _place(fd: int, notes: int) -> tuple[int, int, str]:
    """The inode and the mount of a folder: the same folder may be mounted in several places."""
    found = os.fstat(fd)
    with open(os.open(str(fd), os.O_RDONLY | os.O_CLOEXEC, dir_fd=notes)) as stream:
        mount = next((line.split()[1] for line in stream if line.startswith("mnt_id:")), "")
    return found.st_dev, found.st_ino, mount


def _call(number: int, *arguments: object) -> int:
    try:
        return libc.check(_syscall(number, *arguments), "the mounts of a chroot")
    except OSError as e:
        if e.errno == errno.ENOSYS:
            raise OSError(e.errno, "a sandbox in a chroot needs Linux 5.2 or newer") from e
        raise
