"""How to recognise a keeper from outside: it has a memory file open with data about its job.

It is trusted only for a keeper that gpucr itself has started (known_keepers.py) and that belongs to the reader's user,
in the same user namespace (lookup.py): otherwise somebody could lead a gpucr that runs as root into a mount namespace
with their own CRIU.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from gpucr.json_text import parse

FILE_NAME = "gpucr-keeper"
LINK = f"/memfd:{FILE_NAME} (deleted)"
"""The target of the descriptor's link in /proc."""

SIZE_BYTES = 32 << 10
"""Always written completely in one call, so that a reader never sees part of it."""


class Tag(NamedTuple):
    """A keeper's data. Pids are those of its own namespace.

    ``lineage`` is shared by a job and everything restored from its snapshots. ``root`` is 0 until there is a first
    process. ``network`` is ``own`` or ``host``. ``log_path`` is empty if unknown.
    """

    keeper: int
    root: int
    lineage: str
    isolated: bool
    network: str
    log_path: str


def write(fd: int, tag: Tag) -> None:
    """Put the tag into the file. Raises ValueError if it is too long."""
    data = json.dumps(tag._asdict()).encode()
    if len(data) > SIZE_BYTES:
        raise ValueError("the path of the log is too long")
    os.pwrite(fd, data.ljust(SIZE_BYTES), 0)


def decode(data: bytes) -> Tag | None:
    """The inverse; None for invalid data."""
    try:
        raw: Any = parse(data)
        tag = Tag(**raw)
    except (ValueError, TypeError):
        return None
    kinds = {"keeper": int, "root": int, "lineage": str, "isolated": bool, "network": str, "log_path": str}
    return tag if all(type(raw[name]) is kind for name, kind in kinds.items()) else None
