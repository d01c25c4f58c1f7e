"""Connections that are kept on this machine, for other gpucr processes: a file for each filter, until the next boot."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from gpucr import records
from gpucr.linux import trusted_paths
from gpucr.linux.private_folders import runtime_folder
from gpucr.model import Connection
from gpucr.network.filters import Method
from gpucr.records import Count, Record, RecordError, Text

KeptName = Annotated[str, Meta(pattern=r"\A(gpucr|CRIU)-[A-Za-z0-9-]{1,60}\Z")]
"""A container's runtime lets CRIU make the filter."""

_MAX_BYTES = 64 << 20
"""A connection takes about 120 bytes."""


class KeptRecord(Record, frozen=True):
    """Connections of a job that a dump has ended. ``snapshot``: their owner, as commands name it."""

    name: KeptName
    method: Method
    namespace: Count
    snapshot: Text
    created: Text
    connections: tuple[Connection, ...]

    def __post_init__(self) -> None:
        for connection in self.connections:
            connection.local.require_valid()
            connection.remote.require_valid()


def folder() -> Path:
    """The folder of the records. Raises OSError."""
    return runtime_folder() / "network" / "kept"


def write(record: KeptRecord) -> None:
    """Write a record, whole. Raises OSError."""
    path = folder() / f"{record.name}.json"
    trusted_paths.make_private(path.parent)
    part = path.with_suffix(".part")
    fd = trusted_paths.open_file(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(fd, "wb") as stream:
        stream.write(records.encode(record))
    part.replace(path)


def read(name: str) -> KeptRecord | None:
    """A record; None if there is none, or no valid one."""
    with contextlib.suppress(OSError, RecordError):
        fd = trusted_paths.open_file(folder() / f"{name}.json", os.O_RDONLY)
        with os.fdopen(fd, "rb") as stream:
            return records.decode(stream.read(_MAX_BYTES), KeptRecord)
    return None


def names() -> tuple[str, ...]:
    """The names of all records, also of those that were never written whole."""
    try:
        return tuple(sorted({name.partition(".")[0] for name in os.listdir(folder())}))
    except OSError:
        return ()


def remove(name: str) -> None:
    """Remove a record, if it is there."""
    for ending in ("part", "json"):
        with contextlib.suppress(OSError):
            (folder() / f"{name}.{ending}").unlink()
