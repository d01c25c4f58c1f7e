"""Files in memory, on huge pages where the machine has them: shared between processes by descriptor, not by name."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path
from types import TracebackType

from gpucr.linux import libc, memory
from gpucr.linux.memory import HUGE_PAGE_BYTES
from gpucr.quantities import format_bytes

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # the same numbers on all architectures (since Linux 5.2)
_CLOEXEC, _SET_STRING, _CREATE = 1, 1, 6  # FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC, FSCONFIG_* of uapi/linux/mount.h
_MADV_POPULATE_WRITE = 23  # since Linux 5.14

_SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

# How much a thread maps and touches at a time: keeps gpucr's resident memory below 64 MiB per file.
_PIECE_BYTES = 2 * HUGE_PAGE_BYTES

FILE_NAME = "memfd:gpucr-staging"
"""Names of such files in ``/proc/PID/maps`` (after a slash): on its own tmpfs, and from memfd_create."""

_syscall_of_libc = libc.function("syscall", result=ctypes.c_long)
_madvise = libc.function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


KEPT_NAME = "memfd:gpucr-custom"
"""Name of the file that a suspended process keeps if the driver handed its memory over (custom storage)."""


class StagingFile:
    """A deleted file in memory, for the device memory of one process. Memory is allocated as it is written.

    ``fd`` can be handed to other processes and mapped by them (MAP_SHARED); the memory is freed with the last
    descriptor and mapping, even if their owners are killed. It is charged to the cgroup of the process that touches a
    page first. ``reason``: why the file has no huge pages (None: it has).
    """

    def __init__(self, fd: int, reason: str | None) -> None:
        self.fd = fd
        self.size_bytes = os.fstat(fd).st_size
        self.reason = reason

    @classmethod
    def create(cls, size_bytes: int, name: str = FILE_NAME) -> StagingFile:
        """Make an empty file of this size, rounded up to 2 MiB. It uses no memory yet.

        ``name``: for files other than the driver's staging.

        Huge pages need CAP_SYS_ADMIN (a tmpfs of its own) or a machine that uses them for all shared memory. Raises
        OSError if the file cannot be made (file size limit, no descriptor left).
        """
        failure = None
        try:
            fd = _open_on_private_tmpfs(name)
        except OSError as e:
            fd, failure = os.memfd_create(name.removeprefix("memfd:"), os.MFD_CLOEXEC), e.strerror
        try:
            file = cls(fd, None)
            file.resize(-(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
            file.reason = _why_not_huge(fd, failure)
        except BaseException:
            os.close(fd)
            raise
        return file

    @classmethod
    def adopt(cls, fd: int) -> StagingFile:
        """Take over a descriptor of such a file."""
        return cls(fd, _why_not_huge(fd, None))

    @property
    def has_huge_pages(self) -> bool:
        """Whether every 2 MiB of it become one huge page, if the machine has any free."""
        return self.reason is None

    def resize(self, size_bytes: int) -> None:
        """Set the file's size. Growing uses no memory yet; shrinking frees the memory beyond the new end.

        Raises OSError (file size limit). A process that touches a mapping beyond the end gets SIGBUS.
        """
        os.ftruncate(self.fd, size_bytes)
        self.size_bytes = size_bytes

    def populate(self, offset: int, size_bytes: int, threads: int | None = None) -> None:
        """Allocate and zero the pages of a range, upwards, before they are needed. Existing content stays.

        ``offset`` is a multiple of 2 MiB. ``threads``: None for one per CPU; at most 16. Raises OSError (ENOMEM) before
        anything is allocated where the machine or this process's cgroup has too little left, OSError (ENOSPC, ENOMEM)
        if it runs out on the way; the pages allocated until then stay.
        """
        size_bytes = min(size_bytes, self.size_bytes - offset)
        if size_bytes <= 0:
            return
        self._require_room(size_bytes)
        with mmap.mmap(self.fd, size_bytes, offset=offset) as whole:
            area = ctypes.c_char.from_buffer(whole)
            address = ctypes.addressof(area)
            del area  # otherwise the mapping could not be closed
            with contextlib.suppress(OSError):  # lets the kernel make room for huge pages instead of using small ones
                whole.madvise(mmap.MADV_HUGEPAGE)

            def populate_piece(start: int) -> None:
                self._populate_piece(address + start, offset + start, min(_PIECE_BYTES, size_bytes - start))

            memory.spread(populate_piece, range(0, size_bytes, _PIECE_BYTES), threads)

    def resident_bytes(self) -> int:
        """The memory that the file uses, including swap."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Close the descriptor; a second call does nothing. Other descriptors and mappings of the file stay valid."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> StagingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_room(self, size_bytes: int) -> None:
        """At a limit the kernel kills instead of refusing, so check first."""
        missing = min(size_bytes, self.size_bytes - self.resident_bytes()) - memory.available_bytes()
        if missing > 0:
            raise OSError(errno.ENOMEM, f"{format_bytes(missing)} of host memory are missing for a staging file")

    def _populate_piece(self, address: int, offset: int, size_bytes: int) -> None:
        # One mapping for all threads, and pages dropped from it with madvise: both calls take the address space's lock
        # shared, while a mapping per piece would make every thread wait for the others. A plain write to a page that
        # cannot be allocated would end in SIGBUS.
        if _madvise(address, size_bytes, _MADV_POPULATE_WRITE) == 0:
            _madvise(address, size_bytes, mmap.MADV_DONTNEED)
            return
        error = libc.last_error("madvise")
        if error.errno == errno.EINVAL:  # Linux before 5.14; one thread at a time proceeds
            os.posix_fallocate(self.fd, offset, size_bytes)
        elif error.errno == errno.EFAULT:  # the kernel's error for what would have been a SIGBUS
            raise OSError(errno.ENOSPC, "the file system of the staging file is full") from error
        else:
            raise error


def _why_not_huge(fd: int, failure: str | None) -> str | None:
    """None if the file's block size says that the kernel uses huge pages for it.

    ``failure``: why a separate tmpfs could not be made.
    """
    if os.fstat(fd).st_blksize >= HUGE_PAGE_BYTES:
        return None
    if failure is not None:
        return f"no tmpfs with huge pages can be made ({failure})"
    try:
        policy = _SHMEM_HUGE_PAGES.read_text().strip()
        return f"the machine forbids huge pages in shared memory ({_SHMEM_HUGE_PAGES}: {policy})"
    except OSError:
        return "the kernel was built without huge pages in shared memory"


def _open_on_private_tmpfs(name: str) -> int:
    """A deleted file on an unmounted tmpfs that lives as long as the file. Needs CAP_SYS_ADMIN."""
    with contextlib.ExitStack() as opened:
        context = _syscall("fsopen", _FSOPEN, b"tmpfs", _CLOEXEC)
        opened.callback(os.close, context)
        # The default size limit is half of the machine's memory. 0: only the machine's and the cgroup's limits.
        for option, value in ((b"huge", b"always"), (b"size", b"0"), (b"mode", b"0700")):
            _syscall("fsconfig", _FSCONFIG, context, _SET_STRING, option, value, 0)
        _syscall("fsconfig", _FSCONFIG, context, _CREATE, None, None, 0)
        mount = _syscall("fsmount", _FSMOUNT, context, _CLOEXEC, 0)
        opened.callback(os.close, mount)
        # Not O_TMPFILE: the name later identifies the mapping in a process's maps.
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=mount)
        os.unlink(name, dir_fd=mount)
        return fd


def _syscall(name: str, number: int, *arguments: int | bytes | None) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in arguments]
    return libc.check(_syscall_of_libc(ctypes.c_long(number), *words), name)
