"""How the hooks of one dump reach the attendant: a socket named after CRIU's identity.

Every hook is a separate process, which CRIU starts and waits for. It connects, sends its hook's name in one message,
and gets one back: lines for CRIU's log, and an error if it has to fail.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path

from gpucr import records
from gpucr.errors import BrokenInstall, GpucrError
from gpucr.linux import trusted_paths
from gpucr.linux.process_records import ProcessRecords
from gpucr.model import ProcessId
from gpucr.records import Record, RecordError

MEETINGS = ProcessRecords("hooks")
MESSAGE_LIMIT_BYTES = 192 << 10
_MAX_LINES, _MAX_TEXT = 10, 1000
"""In the message a character takes up to 12 bytes."""


class _Answer(Record, frozen=True):
    lines: tuple[str, ...]
    error: str | None
    hint: str | None
    code: str


def listen(criu: ProcessId) -> socket.socket:
    """The attendant's listening socket, under a name that only root can reach. Raises OSError."""
    path = socket_path(criu)
    trusted_paths.make_private(path.parent)
    MEETINGS.remove_ended()  # leftovers of killed attendants
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listening.bind(str(path))
        listening.listen()
    except BaseException:
        listening.close()
        raise
    return listening


def is_held(criu: ProcessId) -> bool:
    """Whether there is an attendant for this CRIU, or was one that died."""
    return socket_path(criu).exists()


def forget(criu: ProcessId) -> None:
    """Remove the name."""
    with contextlib.suppress(OSError):
        socket_path(criu).unlink()


def call(criu: ProcessId, hook: str) -> list[str]:
    """Let the attendant do a hook's work. Returns lines for CRIU's log. Raises the hook's error."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(str(socket_path(criu)))
            connection.send(hook.encode())
            message = connection.recv(MESSAGE_LIMIT_BYTES)
        except OSError as e:
            raise _attendant_has_ended(hook) from e
    if not message:
        raise _attendant_has_ended(hook)
    try:
        answer = records.decode(message, _Answer)
    except RecordError as e:
        raise _attendant_has_ended(hook) from e
    if answer.error is not None:
        raise GpucrError(answer.error, hint=answer.hint, code=answer.code)
    return list(answer.lines)


def encode_answer(lines: Sequence[str], error: BaseException | None) -> bytes:
    """The message that ends a hook."""
    answer = _Answer(
        lines=tuple(line[:_MAX_TEXT] for line in lines[:_MAX_LINES]),
        error=None if error is None else (str(error) or type(error).__name__)[:_MAX_TEXT],
        hint=None if (hint := getattr(error, "hint", None)) is None else hint[:_MAX_TEXT],
        code=getattr(error, "code", GpucrError.code),
    )
    return records.encode(answer)


def socket_path(criu: ProcessId) -> Path:
    """The path of this CRIU's attendant, beside the records: gpucr in another pid namespace may share the folder."""
    return MEETINGS.path(criu).with_suffix(".sock")


def _attendant_has_ended(hook: str) -> GpucrError:
    return BrokenInstall(
        f"the process that handles the container's GPU state has died before {hook} was done",
        hint="its guard brings the container back; guard.log and hook.log in gpucr's log folder say more",
        code="GPUCR-GUARD",
    )
