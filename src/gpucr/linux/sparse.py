"""Sparse files: the parts that hold data."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator


def data_ranges(fd: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """The parts of a file's first ``size_bytes`` that are not holes, each as begin and end, in ascending order.

    Moves the position of ``fd``. A file system without hole support reports one part (lseek(2), SEEK_DATA). Raises
    OSError.
    """
    end = 0
    while end < size_bytes:
        try:
            begin = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as e:
            if e.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        end = min(os.lseek(fd, begin, os.SEEK_HOLE), size_bytes)
        if begin < end:
            yield begin, end
