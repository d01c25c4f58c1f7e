"""Page-aligned memory for pieces, as O_DIRECT needs, and comparisons without the GIL."""

from __future__ import annotations

import contextlib
import mmap

from gpucr.linux import libc
from gpucr.linux.buffers import address_of
from gpucr.store.backend import Buffer


class AlignedBuffer:
    """Private memory that begins at a page and stays out of child processes."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # open(2): O_DIRECT into private memory is not safe while the process forks, as it does to start CRIU.
        self._memory.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)

    def __len__(self) -> int:
        return len(self.view)


def is_equal(one: Buffer, other: Buffer) -> bool:
    """Whether the bytes are the same."""
    if len(one) != len(other):
        return False
    return not len(one) or libc.memcmp(address_of(one), address_of(other), len(one)) == 0


def is_direct(view: memoryview, block_bytes: int) -> bool:
    """Whether the memory is suitable for O_DIRECT: whole blocks, aligned."""
    if view.readonly or not view or len(view) % block_bytes:
        return False
    return address_of(view) % block_bytes == 0
