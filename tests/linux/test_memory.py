"""Memory maps (gpucr.linux.memory), what a checkpoint adds to them, and the bytes behind them (gpu_state.staging)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.gpu_state import staging
from gpucr.linux import memory
from gpucr.linux.memory import Mapping, new_anonymous_ranges
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import Extent
from tests.children import python, unused_pid
from tests.counter import CounterFactory

MIB = 1 << 20


def anonymous(start: int, end: int, permissions: str = "rw-p", inode: int = 0, path: str = "") -> Mapping:
    return Mapping(start, end, permissions, inode, path)


# --- parsing ---------------------------------------------------------------------------------------------------


def test_maps_of_this_process_show_a_file_it_mapped(tmp_path: Path) -> None:
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
def test_memory_that_is_not_private_and_anonymous(mapping: Mapping) -> None:
    assert not mapping.is_private_anonymous


def test_an_ended_process_has_no_mappings() -> None:
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


def test_available_memory_is_less_than_the_total() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.available_bytes() <= total
    assert 0 < memory.machine_available_bytes() <= total


def test_free_disk_is_what_the_file_system_says(tmp_path: Path) -> None:
    stat = os.statvfs("/proc")
    assert memory.free_disk_bytes(Path("/proc")) == stat.f_bavail * stat.f_frsize == 0
    assert memory.free_disk_bytes(tmp_path) > 0


def test_where_files_take_host_memory() -> None:
    assert memory.lies_in_memory(Path("/dev/shm"))
    assert not memory.lies_in_memory(Path("/proc"))
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        memory.lies_in_memory(Path("/nowhere"))


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


def test_new_ranges_are_the_difference_of_the_two_sets_of_pages() -> None:
    for seed in range(200):
        random_maps = random.Random(seed)  # noqa: S311 - examples, not secrets
        before, after = _some_maps(random_maps), _some_maps(random_maps)
        found = new_anonymous_ranges(before, after)
        pages = [page for extent in found for page in range(extent.address, extent.address + extent.size_bytes)]
        assert pages == sorted(_pages(after) - _pages(before)), seed
        assert all(extent.size_bytes > 0 for extent in found), seed


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


def test_a_new_mapping_is_found_even_if_the_kernel_merged_it() -> None:
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


def test_small_new_mappings_belong_to_the_application() -> None:
    after = (anonymous(0, MIB - 4096), anonymous(2 * MIB, 3 * MIB), anonymous(8 * MIB, 12 * MIB))
    extents = staging.locate((), after)
    assert extents == (Extent(2 * MIB, MIB), Extent(8 * MIB, 4 * MIB))
    assert staging.total_bytes(extents) == 5 * MIB
    assert staging.total_bytes(()) == 0


# --- how far a process is --------------------------------------------------------------------------------------

FILLER = """
import mmap, os, sys
f = os.open(sys.argv[1], os.O_RDWR); m = mmap.mmap(f, 32 << 20)
print(*[line for line in open('/proc/self/maps') if 'rw-s' in line][0].split('-')[:1], flush=True)
done = 0
for line in sys.stdin:
    for at in range(done, int(line), 4096):
        if sys.argv[2] == 'writes': m[at] = 1
        else: m[at]
    done = int(line)
    print(done, flush=True)
"""


class Filler:
    """A process that touches a file's mapping from its start, up to a requested point."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        self.address = int(self._answer(), 16)

    def touch(self, up_to: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{up_to}\n")
        self._process.stdin.flush()
        assert int(self._answer()) == up_to

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@contextlib.contextmanager
def filler(file: StagingFile, how: str) -> Iterator[Filler]:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", FILLER, f"/proc/{os.getpid()}/fd/{file.fd}", how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield Filler(process)
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["writes", "reads"])
@pytest.mark.parametrize("populated", [False, True])
@pytest.mark.parametrize("pages", ["huge", "small"])
def test_the_finished_part_follows_the_process(pages: str, populated: bool, how: str) -> None:
    if pages == "huge":
        file = StagingFile.create(32 * MIB)
    else:
        file = StagingFile.adopt(os.memfd_create("small"))
        file.resize(32 * MIB)
    with file, filler(file, how) as child:
        if populated:
            file.populate(0, 32 * MIB)
        assert memory.present_prefix(child.pid, child.address, 32 * MIB) == 0
        for touched in (4096, 2 * MIB - 4096, 2 * MIB, 2 * MIB + 4096, 7 * MIB, 20 * MIB, 24 * MIB + 8192, 32 * MIB):
            child.touch(touched)
            # All 2 MiB of address space that the last touched page is not in.
            expected = (child.address + touched - 1) // (2 * MIB) * (2 * MIB) - child.address
            assert memory.present_prefix(child.pid, child.address, 32 * MIB) == max(0, expected)
        part = memory.present_prefix(child.pid, child.address, 9 * MIB)
        assert 9 * MIB - 2 * MIB <= part < 9 * MIB


def test_a_range_that_starts_between_two_huge_pages() -> None:
    with mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        view = (ctypes.c_char * len(area)).from_buffer(area)
        address = -(-ctypes.addressof(view) // (2 * MIB)) * (2 * MIB) + 12288
        first = address - ctypes.addressof(view)
        del view
        area[first - 12288] = 1  # the page table's entry for the huge page that the range begins in
        assert memory.present_prefix(os.getpid(), address, 8 * MIB) == 0
        for at in range(first, first + 5 * MIB, mmap.PAGESIZE):
            area[at] = 1
        assert memory.present_prefix(os.getpid(), address, 8 * MIB) == 4 * MIB - 12288
        assert memory.present_prefix(os.getpid(), address, 0) == 0


def test_the_progress_of_an_ended_process() -> None:
    with pytest.raises(OSError, match=r"No such|no memory"):
        memory.present_prefix(unused_pid(), 1 << 30, 1 << 30)
    with python("print('ready', flush=True); input()") as child:
        child.make_zombie()
        with pytest.raises(OSError, match=r"No such|no memory"):
            memory.present_prefix(child.pid, 1 << 30, 1 << 30)


# --- many threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [None, 1, 4, 100])
def test_pieces_are_spread_over_threads(threads: int | None) -> None:
    done: list[int] = []
    memory.spread(done.append, range(1000), threads)
    assert sorted(done) == list(range(1000))
    memory.spread(done.append, range(0), threads)
    assert len(done) == 1000


def test_at_most_16_pieces_are_processed_at_once() -> None:
    meeting = threading.Barrier(16)  # nobody gets past it alone
    names: set[str] = set()

    def meet(piece: int) -> None:
        meeting.wait(timeout=30)
        names.add(threading.current_thread().name)

    memory.spread(meet, range(32), 40)
    assert len(names) == 16


def test_an_error_stops_the_work() -> None:
    done: list[int] = []
    failing = threading.Event()

    def work(piece: int) -> None:
        if piece == 10:
            failing.set()
            raise OSError("piece 10")
        if piece > 10:
            failing.wait(30)
        done.append(piece)

    with pytest.raises(OSError, match="piece 10"):
        memory.spread(work, range(1_000_000), 3)
    assert set(range(10)) <= set(done)
    assert len(done) < 900_000


# --- from outside ----------------------------------------------------------------------------------------------

ANONYMOUS = """
import ctypes, mmap, signal, sys
m = mmap.mmap(-1, 48 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
if sys.argv[1] == 'huge': m.madvise(14)
m[40 << 20:(40 << 20) + 4] = b'kept'
print(ctypes.addressof(ctypes.c_char.from_buffer(m)), flush=True); signal.pause()
"""


def _present_pages(pid: int, address: int, size_bytes: int) -> list[int]:
    """The offsets of the pages that are there."""
    with Path(f"/proc/{pid}/pagemap").open("rb") as pagemap:
        pagemap.seek(address // mmap.PAGESIZE * 8)
        entries = pagemap.read(size_bytes // mmap.PAGESIZE * 8)
    return [at // 8 * mmap.PAGESIZE for at in range(0, len(entries), 8) if entries[at + 7] & 0xC0]


@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize("size", [32 * MIB, 31 * MIB + 4096, 4096, 0])
def test_one_page_in_every_2_mib(size: int, threads: int | None) -> None:
    with python(ANONYMOUS, "small") as child:
        (area,) = child.numbers
        enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        start = area + 4096
        memory.fault_in(child.pid, start, size, threads)
        found = _present_pages(child.pid, start, 36 * MIB)
        if "[always]" in enabled:
            pytest.skip("small pages are not available")
        boundaries = [at - start for at in range(-(-start // (2 * MIB)) * 2 * MIB, start + size, 2 * MIB)]
        first = [0] if size and start % (2 * MIB) else []
        assert found == first + boundaries


def test_madvise_gives_huge_pages() -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this machine has no huge pages")
    with python(ANONYMOUS, "huge") as child:
        (area,) = child.numbers
        start = -(-area // (2 * MIB)) * 2 * MIB
        memory.fault_in(child.pid, start, 36 * MIB, 2)
        assert len(_present_pages(child.pid, start, 36 * MIB)) == 36 * MIB // mmap.PAGESIZE


def test_a_hole_in_the_range_is_an_error() -> None:
    hole = "import ctypes; assert ctypes.CDLL(None).munmap(ctypes.c_void_p(area + (20 << 20)), 8 << 20) == 0\n"
    code = ANONYMOUS.replace("print(", "area = ctypes.addressof(ctypes.c_char.from_buffer(m))\n" + hole + "print(", 1)
    with python(code, "small") as child:
        (area,) = child.numbers
        with pytest.raises(OSError, match="process_vm_writev") as caught:
            memory.fault_in(child.pid, area, 40 * MIB, 1)
        assert caught.value.errno == errno.EFAULT
        assert _present_pages(child.pid, area, 18 * MIB) != []


def test_faulting_in_an_unmapped_range() -> None:
    with pytest.raises(ProcessLookupError):
        memory.fault_in(unused_pid(), 1 << 30, 64 * MIB)
    with python(ANONYMOUS, "small") as child:
        (area,) = child.numbers
        with pytest.raises(OSError, match="process_vm_writev at 0x") as caught:
            memory.fault_in(child.pid, area, 1 << 40, 2)
        assert caught.value.errno == errno.EFAULT
