"""Where CRIU's images of memory are best cut, so that equal memory makes equal pieces.

``pages-N.img`` has the dumped pages of one address space one after the other. A page more or less moves everything
behind it, so pieces of fixed size would all differ. Cut where the address passes a multiple of the piece size, a page
more changes one piece. Which pages they are is told by ``pagemap-ID.img`` (https://criu.org/Memory_images): two magic
numbers, then a head and entries, each a 32-bit length and a protobuf message.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from google.protobuf.message import DecodeError

from gpucr.criu import images_pb2
from gpucr.model import Extent

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
            pagemap = PageMap.parse(data)
            size_bytes = os.stat(images_dir / pagemap.name).st_size
        except (PageMapError, FileNotFoundError):
            continue
        if pagemap.size_bytes == size_bytes and pagemap.name not in found:
            pieces = pagemap.cut(piece_bytes)
            starts = accumulate((piece.size_bytes for piece in pieces[:-1]), initial=0)
            found[pagemap.name] = tuple(starts) if pieces else ()
    return found


class PageMapError(ValueError):
    """The image is not what CRIU writes."""


@dataclass(frozen=True)
class PageMap:
    """What lies in the image of pages that is called ``name``: runs of pages, as addresses and sizes in bytes."""

    name: str
    runs: tuple[Extent, ...]

    @classmethod
    def parse(cls, data: bytes) -> PageMap:
        """From the bytes of ``pagemap-ID.img``. Raises PageMapError."""
        try:
            pages_id, runs = _parse(data)
        except (DecodeError, ValueError) as e:
            raise PageMapError(str(e)) from e
        return cls(f"pages-{pages_id}.img", tuple(runs))

    @property
    def size_bytes(self) -> int:
        """What the image has to be large, if this map is right."""
        return sum(run.size_bytes for run in self.runs)

    def cut(self, piece_bytes: int) -> tuple[Extent, ...]:
        """The pieces: the address of the first page of each, and its size in the image.

        Pages of one window of addresses, as large as a piece can be, are one piece. Compare `size_bytes` with the image
        before: a map that is not right can ask for any number of pieces.
        """
        pieces: list[Extent] = []
        for run in self.runs:
            address = run.address
            while address < run.address + run.size_bytes:
                end = min(run.address + run.size_bytes, (address // piece_bytes + 1) * piece_bytes)
                if pieces and pieces[-1].address // piece_bytes == address // piece_bytes:
                    pieces[-1] = Extent(pieces[-1].address, pieces[-1].size_bytes + end - address)
                else:
                    pieces.append(Extent(address, end - address))
                address = end
        return tuple(pieces)


def _parse(data: bytes) -> tuple[int, list[Extent]]:
    entries = _entries(data)
    head = images_pb2.PagemapHead.FromString(next(entries, b""))
    runs: list[Extent] = []
    for entry in map(images_pb2.PagemapEntry.FromString, entries):
        # An image without flags is of a CRIU that wrote present pages only, or has them in the parent's images.
        if entry.flags & _PRESENT or (not entry.HasField("flags") and not entry.in_parent):
            count = entry.nr_pages if entry.HasField("nr_pages") else entry.compat_nr_pages
            runs.append(Extent(entry.vaddr, count * PAGE_BYTES))
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
