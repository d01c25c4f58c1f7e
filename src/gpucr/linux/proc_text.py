"""The texts of /proc, which hold names that other users choose: of processes, files, mounts, cgroups and sockets.

A line ends with a line feed and with nothing else: the kernel escapes that in most names, and no other byte. Text mode
and `str.splitlines` also end a line at a carriage return, a form feed or U+2028, and `str.split` takes more than spaces
and tabs for blanks. A process named ``\\rNSpid:\\t1`` would have a pid of its choice (seen with Linux 6.18).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

_READ_BYTES = 1 << 15
MOUNTINFO = "/proc/self/mountinfo"

_UNIX_SOCKET = re.compile(
    r"[0-9A-Fa-f]+: [0-9A-F]{8} [0-9A-F]{8} [0-9A-F]{8} [0-9A-F]{4} [0-9A-F]{2} +([0-9]+)(?: (.*))?", re.DOTALL
)
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A line of ``/proc/PID/mountinfo`` (proc_pid_mountinfo(5)). ``root``: what of the file system is mounted.

    ``device`` is that of the file system, as stat(2) has it in ``st_dev``; btrfs has others for its files.
    """

    number: int
    root: str
    point: str
    kind: str
    options: str
    device: int


def read(path: str | os.PathLike[str]) -> bytes:
    """The whole file. Raises OSError. With half of the system calls that a file object makes: /proc has many files."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces: list[bytes] = []
        while piece := os.read(file, _READ_BYTES):
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(file)


def lines(path: str | os.PathLike[str], *, errors: str = "replace") -> list[str]:
    """The file's lines. ``errors``: for bytes that are no text; ``surrogateescape`` where a name is used as a path.

    Raises OSError.
    """
    return in_lines(read(path), errors=errors)


def in_lines(data: bytes, *, errors: str = "replace") -> list[str]:
    """The lines of such a file's content."""
    found = data.decode(sys.getfilesystemencoding(), errors).split("\n")
    return found[:-1] if found[-1] == "" else found


def status_fields(path: str | os.PathLike[str]) -> dict[str, str]:
    """The fields of a ``/proc/PID/status``, by name (proc_pid_status(5)). Raises OSError."""
    return in_status(read(path))


def in_status_field(data: bytes, name: str) -> str | None:
    """One field in the content of a ``/proc/PID/status``, not the name: all of them take long. None: it has no such."""
    start = data.find(b"\n%s:" % name.encode())
    if start < 0:
        return None
    value = data[start + len(name) + 2 : data.find(b"\n", start + 1)]
    return value.decode(sys.getfilesystemencoding(), "replace").strip(" \t")


def in_status(data: bytes) -> dict[str, str]:
    """The fields in the content of a ``/proc/PID/status``."""
    return {name: value.strip(" \t") for name, _, value in [line.partition(":") for line in in_lines(data)]}


def mounts(path: str | os.PathLike[str] = MOUNTINFO) -> Iterator[Mount]:
    """The mounts of a mount namespace, in the kernel's order. Raises OSError."""
    for line in lines(path, errors="surrogateescape"):
        before, _, after = line.partition(" - ")  # the optional fields end at a lone hyphen
        number, _, device, root, point = before.split(" ")[:5]
        kind, _, options = after.split(" ", 2)
        major, _, minor = device.partition(":")
        numbers = os.makedev(int(major), int(minor))
        yield Mount(int(number), _unescaped(root), _unescaped(point), kind, options, numbers)


def unix_socket_names(pid: int) -> dict[str, tuple[str, ...]]:
    """The names of the local sockets in a process's network namespace, by inode: ``@`` begins an abstract one.

    "" is a socket without a name. The kernel writes names to ``/proc/PID/net/unix`` as they are, line feeds too (seen
    with Linux 6.18), so a name can imitate the line of another socket: that one has several names then, one of them
    true. Raises OSError.
    """
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in lines(f"/proc/{pid}/net/unix", errors="surrogateescape")[1:]:
        match = _UNIX_SOCKET.fullmatch(line)
        if match is not None:
            names = found.setdefault(match[1], [])
            names.append(match[2] or "")
        elif names:
            names[-1] += f"\n{line}"
    return {inode: tuple(each) for inode, each in found.items()}


def _unescaped(name: str) -> str:
    """A name of mountinfo, where blanks, line feeds and backslashes are octal escapes (``\\040``)."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), name)
