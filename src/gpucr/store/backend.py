"""What a store needs from its place: named objects, created once, never changed.

A folder (`local`), an object store (`objects`) and the tests' memory are such places. All of them keep these promises,
on which everything else in this package relies:

- An object exists completely or not at all, and is durable when `Backend.create` or `Sink.publish` returns.
- A name is created once: the second writer gets `Exists`. This is the writers' only coordination.
- A list that begins after an object was created has it; one that begins after it was deleted does not.

Names are relative, with plain parts between slashes (`check_name`). Every failure is an OSError; callers handle
`Missing` and `Exists`, all others mean that the place does not work.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Bytes; a memoryview is contiguous, of format ``B``."""

_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,126}")


class Missing(FileNotFoundError):
    """No object has this name (``filename``)."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.ENOENT, "the store has no such object", name)


class Exists(FileExistsError):
    """An object with this name (``filename``) exists, and nothing is ever overwritten."""

    def __init__(self, name: str) -> None:
        super().__init__(errno.EEXIST, "the store has an object of this name", name)


class ObjectInfo(Struct, frozen=True):
    """One object as a listing shows it.

    ``modified_s``: creation time in seconds since 1970 by the place's clock, not this machine's.
    """

    name: str
    size_bytes: int
    modified_s: float


class Sink(Protocol):
    """A new object being filled from the start. One thread at a time; either `publish` or `discard` ends it."""

    @property
    def size_bytes(self) -> int:
        """The bytes written so far."""

    def write(self, data: Buffer) -> None:
        """Append. The caller may reuse the buffer when this returns. Raises OSError."""

    def publish(self) -> None:
        """Make the object durable and visible under its name. Raises Exists, OSError; then nothing of it remains."""

    def discard(self) -> None:
        """Remove it. Idempotent, and without effect after `publish`."""


class Backend(Protocol):
    """A place with objects. All functions may be called from many threads at once."""

    @property
    def url(self) -> str:
        """The place's name in messages."""

    @property
    def identity(self) -> str:
        """Tells this place from a copy of it."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """``length`` bytes from ``offset`` on; None: up to the end. Fewer if the object ends first.

        Raises Missing, OSError.
        """

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from ``offset`` on; returns how many bytes were read. Raises Missing, OSError.

        In a folder, page-aligned reads bypass the page cache.
        """

    def size(self, name: str) -> int:
        """The size in bytes. Raises Missing, OSError."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose name begins with the prefix (a folder with its slash, or nothing), sorted by name.

        Raises OSError.
        """

    def create(self, name: str, parts: Buffer | Sequence[Buffer]) -> None:
        """A new object of these bytes, durable when this returns. Raises Exists, OSError.

        After any OSError but Exists the object may or may not exist, and may even appear later.
        """

    def open_new(self, name: str) -> Sink:
        """A new large object, filled piecemeal: see `Sink`. Raises OSError."""

    def delete(self, name: str) -> None:
        """Remove the object, durably; nothing happens if there is none. Raises OSError."""

    def sweep(self, unchanged_s: float) -> int:
        """Remove unpublished objects of dead writers; returns how many were removed.

        ``unchanged_s``: only those not written to for this long. Raises OSError.
        """


def check_name(name: str) -> None:
    """Raise ValueError unless the name has only plain parts: nothing may lead outside the place."""
    if len(name) > 512 or not all(_PART.fullmatch(part) for part in name.split("/")):
        raise ValueError(f"{name!r} cannot be the name of an object")


def together(found: Iterable[ObjectInfo], most_bytes: int) -> Iterator[list[ObjectInfo]]:
    """The objects in order, grouped for reading: at most this many bytes per group, or one object."""
    group: list[ObjectInfo] = []
    size_bytes = 0
    for info in found:
        if group and size_bytes + info.size_bytes > most_bytes:
            yield group
            group, size_bytes = [], 0
        group.append(info)
        size_bytes += info.size_bytes
    if group:
        yield group


def as_parts(data: Buffer | Sequence[Buffer]) -> Sequence[Buffer]:
    """One buffer or several, as several."""
    return (data,) if isinstance(data, bytes | bytearray | memoryview) else data
