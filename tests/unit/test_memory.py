"""gpucr.linux.memory and gpucr.staging: memory maps, and what a checkpoint adds to them."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
from pathlib import Path

import pytest

from gpucr import staging
from gpucr.linux import memory
from gpucr.linux.memory import Mapping, new_anonymous_ranges
from gpucr.model import Extent
from tests.counter import CounterFactory
from tests.unit.children import python, unused_pid

MIB = 1 << 20


def anonymous(start: int, end: int, permissions: str = "rw-p", inode: int = 0, path: str = "") -> Mapping:
    return Mapping(start, end, permissions, inode, path)


# --- parsing ---------------------------------------------------------------------------------------------------


def test_maps_of_this_process_have_the_file_that_it_mapped(tmp_path: Path) -> None:
    file = tmp_path / "two words (deleted)  x"
    file.write_bytes(bytes(3 * mmap.PAGESIZE))
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert len(mapped) == 3 * mmap.PAGESIZE
        (found,) = [m for m in memory.read_maps(os.getpid()) if m.path == str(file)]
        assert found.end - found.start == 3 * mmap.PAGESIZE
        assert (found.permissions, found.inode) == ("r--s", file.stat().st_ino)
        assert not found.is_private_anonymous
        assert memory.has_mapped(os.getpid(), "two words")
    assert not memory.has_mapped(os.getpid(), "two words")


def test_maps_are_in_order_and_do_not_overlap() -> None:
    maps = memory.read_maps(os.getpid())
    assert len(maps) > 20
    assert all(m.start < m.end for m in maps)
    assert all(before.end <= after.start for before, after in itertools.pairwise(maps))
    assert any(m.path == "[stack]" for m in maps)


@pytest.mark.parametrize(
    "mapping",
    [
        anonymous(0, 1, permissions="rw-s"),
        anonymous(0, 1, permissions="r--p"),
        anonymous(0, 1, permissions="---p"),
        anonymous(0, 1, permissions="rwxp"),
        anonymous(0, 1, inode=7),
        anonymous(0, 1, path="[heap]"),
        anonymous(0, 1, path="/dev/nvidia0"),
    ],
)
def test_what_is_not_private_anonymous_memory(mapping: Mapping) -> None:
    assert not mapping.is_private_anonymous


def test_a_process_that_ended_has_mapped_nothing() -> None:
    pid = unused_pid()
    assert not memory.has_mapped(pid, "")
    assert memory.resident_bytes(pid) == 0
    with pytest.raises(OSError, match=str(pid)):
        memory.read_maps(pid)


def test_libcuda_is_mapped_in_a_cuda_program_only(counter: CounterFactory, process_without_cuda: int) -> None:
    assert memory.has_mapped(counter().pid, "/libcuda.so")
    assert not memory.has_mapped(process_without_cuda, "/libcuda.so")


# --- sizes -----------------------------------------------------------------------------------------------------


def test_largest_anonymous_mapping_and_resident_memory() -> None:
    code = (
        "import mmap, signal\n"
        "m = mmap.mmap(-1, 96 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "m.write(bytes(32 << 20)); print('ready', flush=True); signal.pause()"
    )
    with python(code) as child:
        assert 96 * MIB <= memory.largest_anonymous_bytes(child.pid) < 128 * MIB  # it may merge with a neighbour
        assert 32 * MIB <= memory.resident_bytes(child.pid) < 96 * MIB


def test_available_memory_is_less_than_all() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.available_bytes() <= total


def test_free_disk_is_what_the_file_system_says(tmp_path: Path) -> None:
    stat = os.statvfs("/proc")
    assert memory.free_disk_bytes(Path("/proc")) == stat.f_bavail * stat.f_frsize == 0
    assert memory.free_disk_bytes(tmp_path) > 0


# --- what is new -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ([], [(10, 20)], [(10, 20)]),
        ([(10, 20)], [(10, 20)], []),
        ([(10, 20)], [], []),
        ([(10, 20)], [(10, 15)], []),  # shrunk
        ([(10, 40)], [(10, 15), (30, 40)], []),  # split
        ([(10, 20)], [(10, 50)], [(20, 50)]),  # merged with a new neighbour above
        ([(40, 50)], [(10, 50)], [(10, 40)]),  # below
        ([(20, 30)], [(10, 50)], [(10, 20), (30, 50)]),  # on both sides
        ([(10, 20), (30, 40)], [(10, 40)], [(20, 30)]),  # the gap between two was filled
        ([(10, 20), (20, 30)], [(10, 35)], [(30, 35)]),  # lines that touch
        ([(10, 20)], [(10, 15), (30, 90)], [(30, 90)]),
    ],
)
def test_new_ranges(before: list[tuple[int, int]], after: list[tuple[int, int]], new: list[tuple[int, int]]) -> None:
    maps_before = tuple(anonymous(*each) for each in before)
    maps_after = tuple(anonymous(*each) for each in after)
    assert new_anonymous_ranges(maps_before, maps_after) == tuple(Extent(start, end - start) for start, end in new)


def test_only_private_anonymous_memory_counts() -> None:
    before = (anonymous(10, 20, permissions="---p"), anonymous(30, 40))
    after = (anonymous(10, 20), anonymous(30, 40, permissions="---p"), anonymous(50, 60, path="[heap]"))
    assert new_anonymous_ranges(before, after) == (Extent(10, 10),)


@pytest.mark.parametrize("seed", range(200))
def test_new_ranges_are_the_difference_of_the_two_sets_of_pages(seed: int) -> None:
    random_maps = random.Random(seed)  # noqa: S311 - examples, not secrets
    before, after = _some_maps(random_maps), _some_maps(random_maps)
    found = new_anonymous_ranges(before, after)
    pages = [page for extent in found for page in range(extent.address, extent.address + extent.size_bytes)]
    assert pages == sorted(_pages(after) - _pages(before))
    assert all(extent.size_bytes > 0 for extent in found)


def _some_maps(source: random.Random) -> tuple[Mapping, ...]:
    maps, position = [], 0
    for _ in range(source.randrange(8)):
        start = position + source.randrange(4)
        position = start + source.randrange(1, 9)
        maps.append(anonymous(start, position, permissions=source.choice(["rw-p", "rw-p", "---p"])))
    return tuple(maps)


def _pages(maps: tuple[Mapping, ...]) -> set[int]:
    return {page for m in maps if m.is_private_anonymous for page in range(m.start, m.end)}


# --- staging ---------------------------------------------------------------------------------------------------


def test_a_real_new_mapping_is_located_even_where_the_kernel_merged_it() -> None:
    before = memory.read_maps(os.getpid())
    with mmap.mmap(-1, 24 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        view = (ctypes.c_char * len(area)).from_buffer(area)
        address = ctypes.addressof(view)
        extents = staging.locate(before, memory.read_maps(os.getpid()))
        del view
    covering = [e for e in extents if e.address <= address and address + 24 * MIB <= e.address + e.size_bytes]
    assert len(covering) == 1
    assert covering[0].size_bytes < 32 * MIB
    assert staging.total_bytes(extents) >= 24 * MIB


def test_small_new_mappings_are_the_applications_own() -> None:
    after = (anonymous(0, MIB - 4096), anonymous(2 * MIB, 3 * MIB), anonymous(8 * MIB, 12 * MIB))
    extents = staging.locate((), after)
    assert extents == (Extent(2 * MIB, MIB), Extent(8 * MIB, 4 * MIB))
    assert staging.total_bytes(extents) == 5 * MIB
    assert staging.total_bytes(()) == 0
