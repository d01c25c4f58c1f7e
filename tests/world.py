"""What an operation must leave alone: files and folders with all that stat(2) shows, their content, and locks."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Seen(NamedTuple):
    """A file or folder."""

    inode: int
    mode: int
    links: int
    owner: tuple[int, int]
    size_bytes: int
    modified_ns: int
    changed_ns: int
    read_ns: int
    content: str


class World(NamedTuple):
    """Files by path, and the lines of /proc/locks about them."""

    files: dict[str, Seen]
    locks: list[str]


def world(*folders: Path, read: Sequence[Path] = ()) -> World:
    """Everything below these folders. Those in ``read`` may be read: their access times are left out."""
    files = {str(path): _seen(path) for folder in folders for path in (folder, *folder.rglob("*"))}
    files |= {str(path): _seen(path)._replace(read_ns=0) for folder in read for path in (folder, *folder.rglob("*"))}
    inodes = {each.inode for each in files.values()}
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return World(files, sorted(" ".join(line[1:]) for line in lines if int(line[-3].split(":")[-1]) in inodes))


def settled(*folders: Path, read: Sequence[Path] = ()) -> World:
    """The world once looks leave it alone: a folder's access time follows its last change (relatime)."""
    seen = world(*folders, read=read)
    while seen != (seen := world(*folders, read=read)):
        pass
    return seen


def _seen(path: Path) -> Seen:
    found = path.lstat()
    content = ""
    if stat.S_ISREG(found.st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_NOATIME | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            content = hashlib.sha256(file.read()).hexdigest()
    elif stat.S_ISLNK(found.st_mode):
        content = os.readlink(path)
    return Seen(
        found.st_ino,
        found.st_mode,
        found.st_nlink,
        (found.st_uid, found.st_gid),
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
        found.st_atime_ns,
        content,
    )
