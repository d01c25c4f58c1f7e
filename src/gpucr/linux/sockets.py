"""Local sockets that are bound to a path."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from gpucr.linux import proc_text
from gpucr.linux.processes import PROC, open_files

_SOCKET = re.compile(r"^socket:\[(\d+)\]$")


def bound_socket_paths(pids: Iterable[int], *, is_sandboxed: bool = False) -> tuple[Path, ...]:
    """The absolute paths to which local sockets of these processes are bound, as seen by this process.

    Processes with another root or mount namespace are left out: their paths mean something else here. Not if
    ``is_sandboxed``: in a gpucr sandbox, paths are the same as here. Reads ``/proc/PID/net/unix`` (proc_pid_net(5)); a
    process that has ended is skipped.
    """
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if not is_sandboxed and not sees_our_files(pid):
                continue
            inodes = {match[1] for file in open_files(pid) if (match := _SOCKET.match(file.target))}
            found.update(_bound(pid, inodes))
    return tuple(sorted(found))


def abstract_names(pid: int) -> tuple[str, ...]:
    """The names of the process's abstract local sockets, each with a leading ``@``."""
    inodes = {match[1] for file in open_files(pid) if (match := _SOCKET.match(file.target))}
    return tuple(name for name in _names(pid, inodes) if name.startswith("@"))


def sees_our_files(pid: int) -> bool:
    """Whether paths mean the same to the process as to this one: it has the same mounts and root folder."""
    same_mounts = os.readlink(f"{PROC}/{pid}/ns/mnt") == os.readlink(f"{PROC}/self/ns/mnt")
    return same_mounts and os.readlink(f"{PROC}/{pid}/root") == os.readlink(f"{PROC}/self/root")


def _bound(pid: int, inodes: set[str]) -> Iterable[Path]:
    return (Path(name) for name in _names(pid, inodes) if name.startswith("/"))


def _names(pid: int, inodes: set[str]) -> Iterable[str]:
    for inode, names in proc_text.unix_socket_names(pid).items() if inodes else ():
        if inode in inodes:
            yield from names
