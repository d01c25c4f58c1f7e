"""Where a process's agent listens, and what to do if it is not found there (native/place.h)."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from gpucr.linux import proc_text
from gpucr.linux.pidfds import copied_socket
from gpucr.linux.processes import open_files

FOLDER_VARIABLE = "GPUCR_INTERPOSER_DIR"
_BOUND = re.compile(r"([0-9]+)\.([0-9]+)\.[0-9a-f]{4}")
_SOCKET = re.compile(r"socket:\[([0-9]+)\]")


def socket_path(pid: int) -> Path:
    """The usual name of the agent's socket, seen from here. It may not exist.

    Raises OSError if the process is gone or may not be inspected.
    """
    process = Path("/proc") / str(pid)
    status = proc_text.status_fields(process / "status")
    own_pid, owner = int(status["NSpid"].split()[-1]), int(status["Uid"].split()[1])
    folder = _environment(process).get(FOLDER_VARIABLE) or f"/tmp/gpucr-interposer-{owner}"  # noqa: S108 (0700, checked)
    namespace = (process / "ns" / "pid").stat().st_ino
    return process / "root" / folder.lstrip("/") / f"{own_pid}.{namespace}"


def paths(pid: int) -> Iterator[Path]:
    """All names by which it may be found, the most probable first: the last ones may be other processes'.

    After the usual name those that the kernel knows: the program may have overwritten its environment, somebody else
    has the usual folder, or CRIU has restored the socket in another pid namespace. Raises OSError.
    """
    usual = socket_path(pid)
    yield usual
    own_pid = usual.name.partition(".")[0]
    known = {name for names in proc_text.unix_socket_names(pid).values() for name in names}
    for name in sorted(known):
        if is_bound_name(name) and Path(name).name.startswith(f"{own_pid}."):
            yield Path("/proc") / str(pid) / "root" / name.lstrip("/")


def is_bound_name(path: str) -> bool:
    """Whether agents bind their sockets to such names: every copy of a job makes one of its own."""
    return path.startswith("/") and _BOUND.fullmatch(Path(path).name) is not None


def make_it_listen_again(pid: int) -> None:
    """End the socket on which the agent listens: it makes a new one, with the usual names.

    For an agent whose names were removed, or taken by a clone. Needs the right to trace the process; without it nothing
    happens.
    """
    with contextlib.suppress(OSError):
        known = proc_text.unix_socket_names(pid)
        for file in open_files(pid):
            inode = _SOCKET.fullmatch(file.target)
            names = known.get(inode[1], ()) if inode is not None else ()
            if any(is_bound_name(name) for name in names) and _ended(pid, file.fd):
                return


def _ended(pid: int, number: int) -> bool:
    """Whether that was a listening socket, which is ended now."""
    with copied_socket(pid, number) as found:
        if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        found.shutdown(socket.SHUT_RDWR)
        return True


def _environment(process: Path) -> dict[str, str]:
    entries = os.fsdecode((process / "environ").read_bytes()).split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
