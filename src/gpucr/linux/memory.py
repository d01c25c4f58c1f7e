"""A process's memory: its mappings, its bytes, and how much more it can get."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from gpucr.linux import cgroups, libc, proc_text
from gpucr.linux.processes import PROC
from gpucr.model import Extent

HUGE_PAGE_BYTES = 2 << 20
"""What one entry of the second-lowest page table (PMD) maps on x86-64."""

_PAGEMAP_ENTRY_BYTES = 8  # proc_pid_pagemap(5)
_PRESENT_OR_SWAPPED = 0b11 << 62
_PAGES_PER_CALL = 32  # one byte in each of 32 huge pages: 64 MiB, some 10 ms of zeroing; the kernel takes up to 1024
_MOST_THREADS = 16
_PRIVATE_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)  # TMPFS_MAGIC, RAMFS_MAGIC of include/uapi/linux/magic.h


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


_process_vm_writev = libc.function(
    "process_vm_writev",
    ctypes.c_int,
    ctypes.POINTER(_IoVec),
    ctypes.c_ulong,
    ctypes.POINTER(_IoVec),
    ctypes.c_ulong,
    ctypes.c_ulong,
    result=ctypes.c_ssize_t,
)
_statfs = libc.function("statfs", ctypes.c_char_p, ctypes.c_void_p)


class Mapping(Struct, frozen=True):
    """One line of ``/proc/PID/maps`` (proc_pid_maps(5)). ``inode`` and ``offset`` are 0 for anonymous memory."""

    start: int
    end: int
    permissions: str
    inode: int
    path: str
    offset: int = 0

    @property
    def is_private_anonymous(self) -> bool:
        """Readable and writable private memory without a file: what malloc and the driver's staging use."""
        return self.permissions == "rw-p" and self.inode == 0 and not self.path


def read_maps(pid: int) -> tuple[Mapping, ...]:
    """All mappings of a process. Needs ptrace access to it; raises OSError if it ended."""
    found: list[Mapping] = []
    for line in proc_text.lines(f"{PROC}/{pid}/maps"):
        fields = line.split(maxsplit=5)
        start, _, end = fields[0].partition("-")
        path = fields[5] if len(fields) > 5 else ""
        found.append(Mapping(int(start, 16), int(end, 16), fields[1], int(fields[4]), path, int(fields[2], 16)))
    return tuple(found)


def has_mapped(pid: int, name: str) -> bool:
    """Whether a file whose path contains ``name`` is mapped. False if the process has ended."""
    try:
        return name.encode() in proc_text.read(f"{PROC}/{pid}/maps") and any(
            name in mapping.path for mapping in read_maps(pid)
        )
    except (FileNotFoundError, ProcessLookupError):
        return False


def mapped_bytes(pid: int, name: str) -> int:
    """How many bytes are mapped of files whose path contains ``name``.

    0 if the process has ended, or is another user's.
    """
    try:
        return sum(mapping.end - mapping.start for mapping in read_maps(pid) if name in mapping.path)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0


def new_anonymous_ranges(before: tuple[Mapping, ...], after: tuple[Mapping, ...]) -> tuple[Extent, ...]:
    """The private anonymous ``rw-p`` address ranges that are in ``after`` but not in ``before``.

    Ranges are compared, not lines: the kernel merges a new mapping with a neighbour of the same kind.
    """
    known = [(m.start, m.end) for m in before if m.is_private_anonymous]
    found: list[Extent] = []
    for mapping in after:
        if not mapping.is_private_anonymous:
            continue
        position = mapping.start
        for start, end in known:
            if end <= position or start >= mapping.end:
                continue
            if start > position:
                found.append(Extent(position, start - position))
            position = max(position, end)
        if position < mapping.end:
            found.append(Extent(position, mapping.end - position))
    return tuple(found)


def largest_anonymous_bytes(pid: int) -> int:
    """The size of the largest private anonymous ``rw-p`` mapping (0 if there is none)."""
    return max((m.end - m.start for m in read_maps(pid) if m.is_private_anonymous), default=0)


def resident_bytes(pid: int) -> int:
    """The process's resident memory in bytes (0 if it has ended)."""
    try:
        pages = int((PROC / str(pid) / "statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def present_prefix(pid: int, address: int, size_bytes: int) -> int:
    """How many bytes from ``address`` on are finished, for a process that fills the range in strictly ascending order.

    Counted in whole huge pages (``address`` may lie between two); the huge page, or the small pages within 2 MiB, that
    the process is working on is not counted, so the last one never is. Nothing may have been mapped ahead of the
    process: pages that another process put into a shared file do not count, pages that were faulted in here do. Needs
    ptrace access. Raises OSError if the process has ended.

    Found by bisection with some 15 reads of ``/proc/PID/pagemap`` for 64 GiB. The first page of each 2 MiB of address
    space is proof for everything before it: the kernel may map the neighbours of a touched page too (fault-around,
    large folios), but never beyond the page table of 512 entries that the touched page is in.
    """
    first = -(-address // HUGE_PAGE_BYTES)
    present, absent = first - 1, -(-(address + size_bytes) // HUGE_PAGE_BYTES)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    pagemap = os.open(PROC / str(pid) / "pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        while absent - present > 1:
            middle = (present + absent) // 2
            position = middle * HUGE_PAGE_BYTES // page_bytes * _PAGEMAP_ENTRY_BYTES
            entry = os.pread(pagemap, _PAGEMAP_ENTRY_BYTES, position)
            if len(entry) != _PAGEMAP_ENTRY_BYTES:
                raise ProcessLookupError(f"process {pid} has no memory any more")
            if int.from_bytes(entry, "little") & _PRESENT_OR_SWAPPED:
                present = middle
            else:
                absent = middle
    finally:
        os.close(pagemap)
    return present * HUGE_PAGE_BYTES - address if present >= first else 0


def spread(work: Callable[[int], None], pieces: Iterable[int], threads: int | None = None) -> None:
    """Call ``work`` for each piece, in their order, from several threads. The first error stops the work and is raised.

    ``threads``: None: one per CPU. At most 16: with more, the kernel allocates pages no faster.
    """
    threads = max(1, min(threads or len(os.sched_getaffinity(0)), _MOST_THREADS))
    left = iter(pieces)  # shared: a future per piece would cost more than the piece
    over = threading.Event()

    def take() -> None:
        try:
            for piece in left:
                if over.is_set():
                    return
                work(piece)
        except BaseException:
            over.set()
            raise

    from concurrent.futures import ThreadPoolExecutor  # jobs without CUDA start without it

    with ThreadPoolExecutor(threads) as pool:
        try:
            for taker in [pool.submit(take) for _ in range(threads)]:
                taker.result()
        finally:
            over.set()  # Ctrl-C reached this waiting thread


def private_huge_pages() -> bool:
    """Whether private memory with MADV_HUGEPAGE gets huge pages (transhuge.rst)."""
    try:
        return "[never]" not in _PRIVATE_HUGE_PAGES.read_text()
    except OSError:
        return False


def fault_in(pid: int, address: int, size_bytes: int, threads: int | None = None) -> None:
    """Fault in pages of another process's memory, by writing a zero into each 2 MiB from outside.

    The range must be freshly mapped, private, anonymous, writable and unused: a byte that is not 0 yet would be lost.
    With huge pages advised (MADV_HUGEPAGE) that covers the whole range except what lies before the first or after the
    last 2 MiB boundary; otherwise it is one small page per 2 MiB. Works upwards, with ``threads`` threads (None: one
    per CPU, at most 16), and returns when all is done. Needs ptrace access. Raises ProcessLookupError if the process
    has ended, OSError (EFAULT) if the range is not writable.
    """
    boundaries = range(-(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, address + size_bytes, HUGE_PAGE_BYTES)
    if size_bytes and address % HUGE_PAGE_BYTES:
        _write_zeros(pid, [address])
    spread(
        lambda first: _write_zeros(pid, boundaries[first : first + _PAGES_PER_CALL]),
        range(0, len(boundaries), _PAGES_PER_CALL),
        threads,
    )


def _write_zeros(pid: int, addresses: Sequence[int]) -> None:
    count = len(addresses)
    zero = ctypes.c_char(0)
    here = (_IoVec * count)(*[_IoVec(ctypes.addressof(zero), 1)] * count)
    there = (_IoVec * count)(*[_IoVec(address, 1) for address in addresses])
    done = 0
    while done < count:  # a call that fails midway returns how far it got; the next one says why
        left = count - done
        written = _process_vm_writev(
            pid,
            ctypes.cast(ctypes.byref(here, done * ctypes.sizeof(_IoVec)), ctypes.POINTER(_IoVec)),
            left,
            ctypes.cast(ctypes.byref(there, done * ctypes.sizeof(_IoVec)), ctypes.POINTER(_IoVec)),
            left,
            0,
        )
        if written <= 0:
            raise _write_error(pid, addresses[done], written)
        done += written


def _write_error(pid: int, address: int, result: int) -> OSError:
    what = f"process_vm_writev at {address:#x} of process {pid}"
    return libc.last_error(what) if result < 0 else OSError(errno.EFAULT, f"{what}: {os.strerror(errno.EFAULT)}")


def machine_available_bytes() -> int:
    """Host memory available to new allocations without swapping (MemAvailable of /proc/meminfo)."""
    for line in proc_text.lines(PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable line")


def available_bytes(pid: int | None = None) -> int:
    """Host memory that a process (None: the caller) can still allocate: the machine's, or less by cgroup limits."""
    hard = (limit.available_bytes for limit in cgroups.memory_limits(pid) if limit.is_hard)
    return min([machine_available_bytes(), *hard])


def free_disk_bytes(folder: Path) -> int:
    """How many bytes the caller can still write to this folder's file system."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def lies_in_memory(folder: Path) -> bool:
    """Whether files in this folder use host memory: tmpfs and ramfs."""
    return file_system_of(folder) in _MEMORY_FILE_SYSTEMS


def file_system_of(path: str | os.PathLike[str]) -> int:
    """The kind of file system that this path lies on (``f_type`` of statfs(2)). Raises OSError."""
    found = (ctypes.c_long * 32)()  # struct statfs: 120 bytes on 64-bit machines, the type first
    libc.check(_statfs(os.fsencode(path), found), "", str(path))
    return found[0]
