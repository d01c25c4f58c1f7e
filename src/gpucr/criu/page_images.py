"""Where CRIU's images of memory are best cut, so that equal memory makes equal pieces.

``pages-N.img`` has the dumped pages of one address space one after the other. A page more or less moves everything
behind it, so pieces of fixed size would all differ. Cut where the address passes a multiple of the piece size, a page
more changes one piece. Which pages they are is told by ``pagemap-ID.img`` (https://criu.org/Memory_images): two magic
numbers, then a head and entries, each a 32-bit length and a protobuf message.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from google.protobuf.message import DecodeError

from gpucr.criu import images_pb2

PAGE_BYTES = 4096
_PRESENT = 1 << 2
_MAGIC = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_MAX_ENTRY_BYTES = 1 << 10
_MAX_IMAGE_BYTES = 1 << 30
"""An entry takes about 20 bytes, and no run of pages has more than one."""


def cuts(images_dir: Path, piece_bytes: int) -> Mapping[str, tuple[int, ...]]:
    """Where the pieces of each image of pages begin, by file name; none is larger than ``piece_bytes``.

    An image of which the maps do not tell all is left out: it is cut like any other file. Raises OSError.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(images_dir.glob("pagemap-*.img")):
        with path.open("rb") as stream:
            data = stream.read(_MAX_IMAGE_BYTES)
        try:
            pages_id, runs = _parse(data)
            name = f"pages-{pages_id}.img"
            size_bytes = os.stat(images_dir / name).st_size
        except (DecodeError, ValueError, FileNotFoundError):
            continue
        starts, end = _cut(runs, piece_bytes)
        if end == size_bytes and name not in found:
            found[name] = starts
    return found


def _parse(data: bytes) -> tuple[int, list[tuple[int, int]]]:
    """The number of the image of pages, and the runs that are in it: address and size in bytes."""
    entries = _entries(data)
    head = images_pb2.PagemapHead.FromString(next(entries, b""))
    runs: list[tuple[int, int]] = []
    for entry in map(images_pb2.PagemapEntry.FromString, entries):
        # An image without flags is of a CRIU that wrote present pages only, or has them in the parent's images.
        if entry.flags & _PRESENT or (not entry.HasField("flags") and not entry.in_parent):
            count = entry.nr_pages if entry.HasField("nr_pages") else entry.compat_nr_pages
            runs.append((entry.vaddr, count * PAGE_BYTES))
    return head.pages_id, runs


def _entries(data: bytes) -> Iterator[bytes]:
    position = _MAGIC.size
    while position < len(data):
        if position + _LENGTH.size > len(data):
            raise ValueError("it is cut off")
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        if length > _MAX_ENTRY_BYTES or position + length > len(data):
            raise ValueError("an entry is longer than can be")
        yield data[position : position + length]
        position += length


def _cut(runs: Iterable[tuple[int, int]], piece_bytes: int) -> tuple[tuple[int, ...], int]:
    """The beginnings of pieces: pages of one window of addresses, as large as a piece, are one piece. And the end."""
    starts: list[int] = []
    position, window = 0, -1
    for start, size_bytes in runs:
        address, end = start, start + size_bytes
        while address < end:
            if address // piece_bytes != window:
                window = address // piece_bytes
                starts.append(position)
            length = min(end, (window + 1) * piece_bytes) - address
            address += length
            position += length
    return tuple(starts), position
