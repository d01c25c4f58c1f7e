"""The memory of a dumped process, by kind: what was mapped, and how much of it CRIU's images hold."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageError, ImageReader
from gpucr.model import Extent

MemoryKind = Literal["anonymous", "file", "shared", "huge", "device", "reserved", "kernel"]

MM_MAGIC, PAGEMAP_MAGIC = 0x57492820, 0x56084025
MAX_MM_BYTES = 8 << 20
"""A mapping takes about 50 bytes, and a process has at most 65530 unless vm.max_map_count is raised."""
MAX_PAGEMAP_BYTES = 256 << 20
"""A run of pages takes about 20 bytes."""

_PAGE_BYTES = 4096
_ADDRESSES = 1 << 64
_IN_PARENT, _PRESENT = 1 << 0, 1 << 2
_MAP_HUGETLB = 0x40000  # include/uapi/asm-generic/mman.h

# Bits of a mapping's status (CRIU's image format).
_VSYSCALL, _VDSO, _VVAR, _AIO_RING, _UPROBES = 1 << 2, 1 << 3, 1 << 12, 1 << 13, 1 << 17
_KERNEL = _VSYSCALL | _VDSO | _VVAR | _AIO_RING | _UPROBES
_FILE_PRIVATE, _FILE_SHARED, _ANON_SHARED, _SYSVIPC = 1 << 6, 1 << 7, 1 << 8, 1 << 10
_SOCKET, _MEMFD, _GUARD = 1 << 11, 1 << 14, 1 << 16


class MemoryUse(Struct, frozen=True):
    """Memory of one kind: number of mappings, their address space, and how much of it the snapshot stores.

    ``packed_bytes``: the compressed size of the stored part; None if it is not compressed.
    """

    kind: MemoryKind
    mappings: int
    mapped_bytes: int
    stored_bytes: int
    packed_bytes: int | None = None


class PageRuns:
    """The pages that an image holds: ranges of addresses or, of shared memory, of offsets."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """``runs``: begin and end of each. Raises ImageError if two overlap."""
        self._begins, self._ends, self._before = array("Q"), array("Q"), array("Q")
        total = end_of_last = 0
        for begin, end in sorted(runs):
            if begin < end_of_last:
                raise ImageError(f"the page at {begin:#x} is in it twice")
            end_of_last = end
            self._begins.append(begin)
            self._ends.append(end)
            self._before.append(total)
            total += end - begin
        self.size_bytes = total

    @classmethod
    def read(cls, image: ImageReader) -> PageRuns:
        image.one(images_pb2.PagemapHead)
        return cls(present_runs(image))

    def bytes_within(self, begin: int, end: int) -> int:
        """How many bytes of this range it holds."""
        return self._bytes_below(end) - self._bytes_below(begin) if begin < end else 0

    def _bytes_below(self, address: int) -> int:
        number = bisect_left(self._begins, address) - 1
        if number < 0:
            return 0
        return self._before[number] + min(self._ends[number], address) - self._begins[number]


def present_runs(image: ImageReader) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of pages in the pages image, after the head. Raises ImageError."""
    return (_run(each) for each in image.entries(images_pb2.PagemapEntry) if _is_present(each))


def _is_present(entry: images_pb2.PagemapEntry) -> bool:
    if entry.in_parent or entry.flags & _IN_PARENT:
        return False
    return bool(entry.flags & _PRESENT) or not entry.HasField("flags")  # old images have no flags


def _run(entry: images_pb2.PagemapEntry) -> tuple[int, int]:
    count = entry.nr_pages if entry.HasField("nr_pages") else entry.compat_nr_pages
    end = entry.vaddr + count * _PAGE_BYTES
    if end >= _ADDRESSES:
        raise ImageError(f"the {count} pages at {entry.vaddr:#x} are more than can be")
    return entry.vaddr, end


class MappedRange(Struct, frozen=True):
    """One mapping of a process, without its content. ``source`` is the id of its file, or of its shared memory."""

    kind: MemoryKind
    begin: int
    end: int
    offset: int
    source: int
    is_memory_file: bool
    is_accessible: bool


def read_mappings(image: ImageReader) -> tuple[MappedRange, ...]:
    """From ``mm-PID.img``. Raises ImageError."""
    space = image.one(images_pb2.AddressSpace)
    # A guard is not a mapping but marks pages of another one.
    return tuple(_mapped(each) for each in space.vmas if not each.status & _GUARD)


def _mapped(entry: images_pb2.Mapping) -> MappedRange:
    if not entry.start < entry.end:
        raise ImageError(f"the mapping at {entry.start:#x} ends at {entry.end:#x}")
    return MappedRange(
        kind=_kind(entry.status, entry.flags),
        begin=entry.start,
        end=entry.end,
        offset=entry.pgoff,
        source=entry.shmid,
        is_memory_file=bool(entry.status & _MEMFD),
        is_accessible=entry.prot != 0,
    )


def _kind(status: int, flags: int) -> MemoryKind:
    if status & _KERNEL:
        return "kernel"
    if status & (_ANON_SHARED | _SYSVIPC) or (status & _MEMFD and status & _FILE_SHARED):
        return "shared"
    if flags & _MAP_HUGETLB:
        return "huge"
    if status & (_FILE_PRIVATE | _FILE_SHARED | _SOCKET):
        return "file"
    return "anonymous"


def memory_uses(
    mappings: Sequence[MappedRange],
    pages: PageRuns,
    shared: Mapping[int, PageRuns],
    device: Sequence[Extent] = (),
) -> tuple[MemoryUse, ...]:
    """A process's mapped memory, by kind; absent kinds are omitted.

    ``shared`` are the pages of shared memory by ``source``. ``device`` is where the driver left device memory that is
    in CRIU's images: it counts as such and not as anonymous. ``huge`` are private pages of hugetlbfs, ``kernel`` what
    the kernel maps into every process. Address space that nobody may access and that holds nothing is ``reserved``.
    """
    counts: dict[MemoryKind, list[int]] = {}
    left = sorted((extent.address, extent.address + extent.size_bytes) for extent in device)
    for each in mappings:
        stored = pages.bytes_within(each.begin, each.end)
        size = each.end - each.begin
        if each.kind == "anonymous":
            for begin, end in _within(left, each.begin, each.end):
                held = pages.bytes_within(begin, end)
                _count(counts, "device", end - begin, held)
                size, stored = size - (end - begin), stored - held
            if size == 0:
                continue
        if each.kind == "shared" and each.source in shared:
            stored = shared[each.source].bytes_within(each.offset, each.offset + size)
        is_reserved = each.kind == "anonymous" and not each.is_accessible and not stored
        _count(counts, "reserved" if is_reserved else each.kind, size, stored)
    return tuple(MemoryUse(kind, *counts[kind]) for kind in KINDS if kind in counts)


KINDS: tuple[MemoryKind, ...] = ("device", "anonymous", "file", "shared", "huge", "kernel", "reserved")
"""In the order in which they are shown."""


def _within(extents: Sequence[tuple[int, int]], begin: int, end: int) -> Iterable[tuple[int, int]]:
    first = max(bisect_right(extents, (begin, 0)) - 1, 0)
    for extent_begin, extent_end in extents[first:]:
        if extent_begin >= end:
            break
        if extent_end > begin:
            yield max(begin, extent_begin), min(end, extent_end)


def _count(counts: dict[MemoryKind, list[int]], kind: MemoryKind, size_bytes: int, stored_bytes: int) -> None:
    total = counts.setdefault(kind, [0, 0, 0])
    total[0] += 1
    total[1] += size_bytes
    total[2] += stored_bytes
