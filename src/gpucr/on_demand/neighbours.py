"""How the forwarders of a machine talk: each answers on a socket in the abstract namespace (unix(7)).

Everybody finds them there without a file, across users, and they are gone with their process. Nobody is trusted: what
a forwarder says counts for the user that the kernel names, and each decides about its own job alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpucr import records
from gpucr.jobs.names import is_name
from gpucr.linux import proc_text, sockets
from gpucr.linux.processes import PROC
from gpucr.model import ProcessId
from gpucr.on_demand.policy import Contender
from gpucr.records import RecordError

_NAME = re.compile(r"@(gpucr-on-demand/(\d{1,10})/(\d{1,10}))$")
MOST_BYTES = 64 << 10
_ANSWER_LIMIT_S = 1.0
_CREDENTIALS = struct.Struct("=iII")

Message = dict[str, Any]


class Neighbour(Struct, frozen=True):
    """Another forwarder: where it answers, and its description of its job, whose name has the forwarder's pid here."""

    address: str
    job: Contender


def address_of(pid: int, uid: int | None = None) -> str:
    """Where the forwarder with this pid answers; it is a process of this user (None: the caller)."""
    return f"\0gpucr-on-demand/{os.geteuid() if uid is None else uid}/{pid}"


def message_in(text: bytes) -> Message:
    """The message that a line is. Raises ValueError."""
    found = records.read_json(text)
    if not isinstance(found, dict):
        raise RecordError("it is not an object")
    return found


def ask(address: str, message: Message, limit_s: float = _ANSWER_LIMIT_S) -> tuple[Message, int]:
    """Ask a forwarder, from a thread that may wait. Returns its answer and its user.

    Raises OSError (it is gone, or says nothing), and ValueError for an invalid answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as asking:
        asking.settimeout(limit_s)
        sockets.connect(asking, address, limit_s=limit_s)
        uid = user_of(asking)
        asking.sendall(json.dumps(message).encode() + b"\n")
        text = b""
        while not text.endswith(b"\n") and len(text) < MOST_BYTES:
            piece = asking.recv(MOST_BYTES)
            if not piece:
                raise ConnectionResetError("it has gone without an answer")
            text += piece
    return message_in(text), uid


def neighbours(silent: set[str]) -> Iterator[Neighbour]:
    """The other forwarders of this machine. Those that do not answer are added to ``silent``, and not asked again."""
    for address, pid in _addresses():
        if pid == os.getpid() or address in silent:
            continue
        try:
            told, uid = ask(address, {"ask": "look"})
            job = contender_in(told, "job", uid)
        except (FileNotFoundError, ConnectionError):  # it has just ended
            continue
        except (OSError, ValueError):
            silent.add(address)
            continue
        yield Neighbour(address, replace(job, name=f"{job.name} ({pid})"))


def status_of(forwarder: ProcessId) -> Message | None:
    """How a forwarder of the caller describes its job and itself; None if it does not answer."""
    with contextlib.suppress(OSError, ValueError):
        told, uid = ask(address_of(forwarder.pid), {"ask": "status"})
        if uid == os.geteuid():
            return told
    return None


def contender_in(message: Message, member: str, uid: int) -> Contender:
    """The job in a message, as one of the user who sent it. Raises ValueError."""
    found = records.convert(message.get(member), Contender)
    if not is_name(found.name):
        raise RecordError(f"{found.name!r} cannot be the name of a job")
    return replace(found, uid=uid)


def _addresses() -> Iterator[tuple[str, int]]:
    for line in proc_text.lines(PROC / "net" / "unix"):
        found = _NAME.search(line)
        if found is not None:
            yield f"\0{found[1]}", int(found[3])


def user_of(peer: socket.socket) -> int:
    """Whose process is at the other end, as the kernel says."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
