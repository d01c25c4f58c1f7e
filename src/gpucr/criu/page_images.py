"""Where CRIU's images of memory are best cut, so that equal memory makes equal pieces.

``pages-N.img`` has the dumped pages of one address space one after the other. One page more or less shifts everything
after it, so pieces of fixed size would all differ. Cutting where the address passes a multiple of the piece size limits
the change to one piece. The pages are listed in ``pagemap-ID.img`` (https://criu.org/Memory_images): two magic numbers,
then a head and entries (see image_entries.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageError, ImageReader, images_in
from gpucr.criu.imaged_memory import MAX_PAGEMAP_BYTES, PAGEMAP_MAGIC, present_runs
from gpucr.model import Extent


def cuts(images_dir: Path, piece_bytes: int) -> Mapping[str, tuple[int, ...]]:
    """Where the pieces of each image of pages begin, by file name; none is larger than ``piece_bytes``.

    An image that the maps do not fully describe is left out: it is cut like any other file. Raises OSError.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(images_dir.glob("pagemap-*.img")):
        try:
            with images_in(images_dir)(path.name) as stream:
                pagemap = PageMap.read(stream)
            size_bytes = os.stat(images_dir / pagemap.name).st_size
        except (ImageError, FileNotFoundError):
            continue
        if pagemap.size_bytes == size_bytes and pagemap.name not in found:
            pieces = pagemap.cut(piece_bytes)
            starts = accumulate((piece.size_bytes for piece in pieces[:-1]), initial=0)
            found[pagemap.name] = tuple(starts) if pieces else ()
    return found


class PageMap(Struct, frozen=True):
    """The content of the pages image ``name``: runs of pages, as addresses and sizes in bytes."""

    name: str
    runs: tuple[Extent, ...]

    @classmethod
    def read(cls, stream: BinaryIO) -> PageMap:
        """From ``pagemap-ID.img``. Raises ImageError and OSError."""
        image = ImageReader(stream, PAGEMAP_MAGIC, "pages", max_bytes=MAX_PAGEMAP_BYTES)
        head = image.one(images_pb2.PagemapHead)
        return cls(
            f"pages-{head.pages_id}.img", tuple(Extent(begin, end - begin) for begin, end in present_runs(image))
        )

    @property
    def size_bytes(self) -> int:
        """The size that the image must have if this map is right."""
        return sum(run.size_bytes for run in self.runs)

    def cut(self, piece_bytes: int) -> tuple[Extent, ...]:
        """The pieces: the address of the first page of each, and its size in the image.

        Pages of one window of addresses, as large as a piece can be, are one piece. Compare `size_bytes` with the image
        first: a wrong map can yield any number of pieces.
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
