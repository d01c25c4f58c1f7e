"""The protocol of the helper's socket: one JSON object per packet, with the descriptors that belong to it.

The client sends `Ask`, `Dump`, `Isolate` or `Restore`; a `Restore` is followed by `Files` messages for all files. The
helper answers `Here`, then sends a `Hook` whenever CRIU waits for an `Answer`, and finally `Done` or `Failed`. The
client may send `Stop` at any time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gpucr import records
from gpucr.criu.options import GHOST_LIMIT_MAX_BYTES
from gpucr.records import Pid, RecordError

SIGNATURE_NAME = "gpucr-helper.json"
"""The file beside the images in which the helper has signed them."""

MAX_REQUESTS_PER_USER = 8
"""The trees of one job are restored at the same time, with a request for each."""

MAX_BYTES = 64 << 10
MAX_DESCRIPTORS = 200
"""Per packet; the kernel allows 253 (SCM_MAX_FD)."""
MAX_FILES = 1 << 15
"""Open files and mappings of one tree."""
MAX_CLOSED = 4096
"""Connections that a restore closes."""

_FD = struct.Struct("i")
_MAX_PID = 1 << 22
"""The kernel's maximum (PID_MAX_LIMIT)."""

Network = Literal["own", "host"]
Number = Annotated[int, Meta(ge=0, lt=1 << 32)]
Line = Annotated[str, Meta(max_length=4096, pattern=r"\A[^\ud800-\udfff]*\Z")]


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=str.lower):
    """Base of all messages: ``kind`` names the class."""


class Ask(_Message, frozen=True):
    """Ask for the helper's version and pid."""


class Dump(_Message, frozen=True):
    """Dump this process's tree. Descriptors: the user's folder for the images, a file for CRIU's log.

    ``keeper``: the pid of its sandbox's keeper; 0: no sandbox.
    """

    pid: Pid
    start_time_ticks: Annotated[int, Meta(ge=0)]
    leave_running: bool
    ghost_limit_bytes: Annotated[int, Meta(ge=0, le=GHOST_LIMIT_MAX_BYTES)]
    keeper: Number


class Isolate(_Message, frozen=True, omit_defaults=True):
    """Make a sandbox. Descriptors: the three of its keeper, whose pid `Done` returns.

    ``network``: its own, or the machine's. Its pids start above ``last_pid``. ``terminals``: it has a /dev/pts.
    """

    network: Network
    last_pid: Annotated[int, Meta(ge=0, le=_MAX_PID)]
    terminals: bool = False


class Restore(_Message, frozen=True):
    """Restore a tree. Descriptors: the folder with its images, a file for the log, and the three of a keeper.

    ``keeper``: the pid of the keeper of the target sandbox, whose descriptors are then omitted; 0: no sandbox.
    ``closed``: connections to restore closed, by their inode in the images. ``files``: how many files will follow.
    """

    leave_stopped: bool
    closed: Annotated[tuple[Number, ...], Meta(max_length=MAX_CLOSED)]
    files: Annotated[int, Meta(ge=0, le=MAX_FILES)]
    keeper: Number


class Files(_Message, frozen=True):
    """Files of the job by their numbers in the images, one descriptor each."""

    ids: Annotated[tuple[Number, ...], Meta(min_length=1, max_length=MAX_DESCRIPTORS)]


class Answer(_Message, frozen=True):
    """The answer to a hook."""

    proceed: bool


class Stop(_Message, frozen=True):
    """Fail the operation and undo it."""


Request = Ask | Dump | Isolate | Restore | Files | Answer | Stop


class Here(_Message, frozen=True):
    """The helper's process for this request, and the version of its CRIU."""

    version: tuple[int, int, int]
    pid: Pid
    start_time_ticks: Annotated[int, Meta(ge=0)]


class Hook(_Message, frozen=True):
    """CRIU waits at this hook. ``pid``: the tree's root, 0 if it does not exist yet."""

    name: Line
    pid: Number


class Done(_Message, frozen=True):
    """CRIU has finished. ``pid``: the tree's root."""

    pid: Pid


class Failed(_Message, frozen=True):
    """Nothing was changed, or all is undone. ``because``: the helper refused, CRIU failed, or the client stopped it."""

    because: Literal["refused", "criu", "stopped"]
    message: Line
    reason: Line = ""
    hint: Line | None = None
    code: Line | None = None


Reply = Here | Hook | Done | Failed


class BadMessage(Exception):
    """Not a message of this protocol, or one out of turn."""


class HungUp(Exception):
    """The other end has disconnected."""


class Connection:
    """One end of the socket. Closes it at the end of a `with` block."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, message: Struct, fds: Sequence[int] = ()) -> None:
        """Raises HungUp."""
        data = msgspec.json.encode(message)
        if len(data) > MAX_BYTES:
            raise BadMessage(f"a message of {len(data)} bytes")
        try:
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]
                self.socket.sendmsg([data], rights, socket.MSG_NOSIGNAL)
            else:
                self.socket.send(data, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError) as e:
            raise HungUp from e

    def receive(self, *kinds: type[Any], until: float | None = None) -> tuple[Any, tuple[int, ...]]:
        """The next message, one of ``kinds``, and its descriptors, which are the caller's to close.

        Raises TimeoutError when ``until`` (time.monotonic) passes, HungUp, BadMessage.
        """
        self.socket.settimeout(None if until is None else max(until - time.monotonic(), 0.001))
        space = socket.CMSG_SPACE(_FD.size * (MAX_DESCRIPTORS + 1))
        try:
            data, ancillary, flags, _ = self.socket.recvmsg(MAX_BYTES + 1, space, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError as e:
            raise HungUp from e
        fds = _descriptors(ancillary)
        try:
            if not data:
                raise HungUp
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(data) > MAX_BYTES or len(fds) > MAX_DESCRIPTORS:
                raise BadMessage("a message that is too long")
            return decode(data, *kinds), fds
        except BaseException:
            close_all(fds)
            raise


def decode(data: bytes, *kinds: type[Any]) -> Any:
    """A message of one of these kinds. Raises BadMessage."""
    try:
        value = records.read_json(data)
        tags = {kind.__name__.lower(): kind for kind in kinds}
        found = tags.get(value.get("kind", "")) if isinstance(value, dict) and _is_text(value.get("kind")) else None
        if found is None:
            raise BadMessage("a message of another kind")
        return records.convert(value, found)
    except (RecordError, UnicodeDecodeError) as e:
        raise BadMessage(str(e)) from e


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors received with a message."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[int, ...]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found += [fd for (fd,) in _FD.iter_unpack(data[: len(data) - len(data) % _FD.size])]
    return tuple(found)
