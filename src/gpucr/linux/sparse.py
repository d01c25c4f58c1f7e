"""Sparse files: the parts that hold data."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

_BLOCK_BYTES = 1 << 20
_ZEROS = bytes(_BLOCK_BYTES)


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


def copy_data(source: int, target: int, size_bytes: int) -> None:
    """Copy this many bytes, except zeros: ``target`` is an empty file. Raises OSError."""
    os.ftruncate(target, size_bytes)
    for begin, end in data_ranges(source, size_bytes):
        position = begin
        while block := os.pread(source, min(_BLOCK_BYTES, end - position), position):
            if block != _ZEROS[: len(block)]:
                _write_all(target, block, position)
            position += len(block)


def _write_all(target: int, block: bytes, position: int) -> None:
    view = memoryview(block)
    while view:
        written = os.pwrite(target, view, position)
        view, position = view[written:], position + written
