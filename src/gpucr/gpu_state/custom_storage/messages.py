"""Messages between gpucr and its carrier.

Requests go one at a time, with descriptors, over a SOCK_SEQPACKET socket. Device memory goes through shared memory: a
lane has a slot there, and a socket on which a thread of the carrier waits.
"""

from __future__ import annotations

import struct

from msgspec import Struct

LANES = 12
SLOT_BYTES = 4 << 20
MESSAGE_BYTES = 1 << 16

PASS = struct.Struct("<QQIB")
"""A lane's request: pid, position in its held bytes, size, and whether the bytes go to the GPU."""


class Ask(Struct, frozen=True, omit_defaults=True):
    """A request. ``what`` names a method of `carrier.Carrier`; the other members are its arguments."""

    what: str
    pid: int = 0
    start_time_ticks: int = 0
    uuids: tuple[str, ...] = ()
    gpu_map: tuple[tuple[str, str], ...] = ()
    size_bytes: int = 0
    piece_bytes: int = 0
    is_whole: bool = False
    keeps_itself: bool = False


class Failure(Struct, frozen=True, omit_defaults=True):
    """Why a request failed. ``result``: the driver's result of ``action``, which left the process in ``state``."""

    message: str
    hint: str | None = None
    action: str = ""
    result: int = 0
    state: str | None = None


class Answer(Struct, frozen=True, omit_defaults=True):
    """The answer to a request. ``parts``: by GPU, how much memory is held, in order of position."""

    failure: Failure | None = None
    parts: tuple[tuple[str, int], ...] = ()
