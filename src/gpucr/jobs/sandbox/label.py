"""How a keeper is recognised from outside: a file in memory that it has open, with what must be known of its job.

It is believed only of a keeper that gpucr itself has started (known.py), which belongs to the same user as the reader,
in the same user namespace (found.py): else somebody could lead a gpucr that runs as root into a mount namespace with a
CRIU of their own.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from gpucr.json_text import parse

FILE_NAME = "gpucr-keeper"
LINK = f"/memfd:{FILE_NAME} (deleted)"
"""What the descriptor's link in /proc says."""

SIZE_BYTES = 32 << 10
"""Always written as a whole and in one piece, so that a reader never sees half of it."""


class Tag(NamedTuple):
    """What a keeper says of itself. Pids are those of its own namespace.

    ``lineage`` is the same for a job and for everything that was restored from its snapshots. ``root`` is 0 until there
    is a first process. ``network`` is ``own`` or ``host``. ``log_path`` is empty where it is not known.
    """

    keeper: int
    root: int
    lineage: str
    isolated: bool
    network: str
    log_path: str


def write(fd: int, tag: Tag) -> None:
    """Put the tag into the file. Raises ValueError where it is too long."""
    data = json.dumps(tag._asdict()).encode()
    if len(data) > SIZE_BYTES:
        raise ValueError("the path of the log is too long")
    os.pwrite(fd, data.ljust(SIZE_BYTES), 0)


def decode(data: bytes) -> Tag | None:
    """The inverse; None for anything else."""
    try:
        raw: Any = parse(data)
        tag = Tag(**raw)
    except (ValueError, TypeError):
        return None
    kinds = {"keeper": int, "root": int, "lineage": str, "isolated": bool, "network": str, "log_path": str}
    return tag if all(type(raw[name]) is kind for name, kind in kinds.items()) else None
