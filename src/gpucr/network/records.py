"""What is blocked on this machine, for other gpucr processes: a file for each filter. They last until the next boot.

A record of an operation is locked while the operation or its guard lives. One that is not locked was left behind.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from msgspec import Meta

from gpucr import records
from gpucr.linux import locks, trusted_paths
from gpucr.linux.private_folders import runtime_folder
from gpucr.model import Connection, ProcessId
from gpucr.network.filters import Method
from gpucr.records import Count, Record, RecordError, Text

FilterName = Annotated[str, Meta(pattern=r"\Agpucr-[a-z0-9-]{1,19}\Z")]
KeptName = Annotated[str, Meta(pattern=r"\A(gpucr|CRIU)-[A-Za-z0-9-]{1,60}\Z")]
"""A container's runtime lets CRIU make the filter."""

_MAX_BYTES = 64 << 20
"""A connection takes about 120 bytes."""

T = TypeVar("T", bound="OperationRecord | KeptRecord")


class FilterRecord(Record, frozen=True):
    """A filter with the operation's name. ``namespace``: the number of the network namespace."""

    method: Method
    namespace: Count


class OperationRecord(Record, frozen=True):
    """What an operation does to a job's sockets. ``scope``: where its pids hold (process_records.py).

    ``reusing``: those with SO_REUSEADDR, by inode. ``stopped``: processes that nothing but the operation stops, and
    that may run again as they are. ``kept``: the record of connections that it keeps.
    """

    name: FilterName
    scope: Text
    filters: tuple[FilterRecord, ...]
    processes: tuple[ProcessId, ...]
    reusing: tuple[Count, ...]
    stopped: tuple[ProcessId, ...]
    kept: FilterName | None


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


Kind = Literal["operations", "kept"]


def folder(kind: Kind) -> Path:
    """The folder of these records. Raises OSError."""
    return runtime_folder() / "network" / kind


def write(kind: Kind, record: OperationRecord | KeptRecord) -> None:
    """Write a record, whole. Raises OSError."""
    path = folder(kind) / f"{record.name}.json"
    trusted_paths.make_private(path.parent)
    part = path.with_suffix(".part")
    fd = trusted_paths.open_file(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(fd, "wb") as stream:
        stream.write(records.encode(record))
    part.replace(path)


def read(kind: Kind, name: str, of: type[T]) -> T | None:
    """A record; None if there is none, or no valid one."""
    with contextlib.suppress(OSError, RecordError):
        fd = trusted_paths.open_file(folder(kind) / f"{name}.json", os.O_RDONLY)
        with os.fdopen(fd, "rb") as stream:
            return records.decode(stream.read(_MAX_BYTES), of)
    return None


def names(kind: Kind) -> tuple[str, ...]:
    """The names of all records, also of those that were never written whole."""
    try:
        return tuple(sorted({name.partition(".")[0] for name in os.listdir(folder(kind))}))
    except OSError:
        return ()


def remove(kind: Kind, name: str) -> None:
    """Remove a record, if it is there."""
    for ending in ("part", "json", "lock"):  # the last one says that somebody works on it
        with contextlib.suppress(OSError):
            (folder(kind) / f"{name}.{ending}").unlink()


def hold(name: str) -> int:
    """Make and lock the file that says that an operation lives. Returns its descriptor.

    Raises OSError; BlockingIOError if another process holds it.
    """
    path = folder("operations") / f"{name}.lock"
    trusted_paths.make_private(path.parent)
    while True:
        fd = trusted_paths.open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            locks.lock(fd)
            if os.fstat(fd).st_nlink:  # else somebody has removed it meanwhile
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
