"""The log of dm-log-writes, which QEMU's blklogwrites writes too: what was on the disk if the power went.

Documentation/admin-guide/device-mapper/log-writes.rst has the format. A write is logged when it has completed, and what
was flushed is logged before the flush that it needs. So at each flush, everything before it is on the disk; of what
came after it, a disk with a volatile cache has any part.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_MAGIC = 0x6A736677736872
_SUPER = struct.Struct("<QQQL")
_ENTRY = struct.Struct("<QQQQ")
_FLUSH, _FUA, _DISCARD, _MARK, _METADATA = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class Entry:
    """One write: ``sectors`` of the log's size from ``sector`` on, and where its data is in the log."""

    sector: int
    sectors: int
    flags: int
    data_at: int
    data_bytes: int

    @property
    def is_flush(self) -> bool:
        """Whether all that was logged before it is on the disk for good."""
        return bool(self.flags & (_FLUSH | _FUA))


class WriteLog:
    """The entries of a log on the device ``path``, and the marks that somebody has put between them.

    With ``marks_from`` marks are writes from that sector of the disk on, of 512 bytes.
    """

    def __init__(self, path: str, marks_from: int | None = None) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        magic, version, count, self.sector_bytes = _SUPER.unpack(os.pread(self._fd, _SUPER.size, 0))
        if magic != _MAGIC or version != 1:
            raise ValueError(f"{path} is no log of dm-log-writes")
        self.entries: list[Entry] = []
        self.marks: dict[str, int] = {}
        at = self.sector_bytes
        for _ in range(count):
            sector, sectors, flags, length = _ENTRY.unpack(os.pread(self._fd, _ENTRY.size, at))
            if flags & _MARK:
                name = os.pread(self._fd, length, at + _ENTRY.size).decode()
                self.marks[name] = len(self.entries)
                at += self.sector_bytes
                continue
            at += self.sector_bytes
            data_bytes = 0 if flags & _DISCARD else sectors * self.sector_bytes
            if marks_from is not None and sectors and sector >= marks_from:
                self.marks[os.pread(self._fd, data_bytes, at).rstrip(b"\0").decode()] = len(self.entries)
                at += data_bytes
                continue
            self.entries.append(Entry(sector, sectors, flags, at, data_bytes))
            at += data_bytes

    def flushes(self) -> list[int]:
        """The numbers of entries that complete a flush."""
        return [number for number, entry in enumerate(self.entries) if entry.is_flush]

    def apply(self, first: int, last: int, device: str) -> None:
        """Write the entries from ``first`` to ``last`` (not included)."""
        with _opened(device) as fd:
            for entry in self.entries[first:last]:
                self._write(entry, fd)

    def apply_part(self, first: int, last: int, device: str, chance: random.Random) -> None:
        """Write any of the entries, in any order, as a volatile cache does that loses its power."""
        entries = [entry for entry in self.entries[first:last] if chance.random() < 0.5]
        chance.shuffle(entries)
        with _opened(device) as fd:
            for entry in entries:
                self._write(entry, fd)

    def _write(self, entry: Entry, fd: int) -> None:
        left, at, to = entry.data_bytes, entry.data_at, entry.sector * self.sector_bytes
        while left:
            data = os.pread(self._fd, min(left, 1 << 20), at)
            os.pwrite(fd, data, to)
            left, at, to = left - len(data), at + len(data), to + len(data)


class _opened:  # noqa: N801 - used like a function
    def __init__(self, device: str) -> None:
        self._fd = os.open(device, os.O_WRONLY)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.fsync(self._fd)
        os.close(self._fd)


def moments(log: WriteLog, count: int, chance: random.Random) -> Iterator[tuple[int, int]]:
    """Moments of a power loss, in order: the last flush before it, and how far the log had come."""
    flushes = log.flushes()
    after = flushes.index(next(number for number in flushes if number >= log.marks["begin"]))
    for chosen in sorted(chance.sample(range(after, len(flushes) - 1), min(count, len(flushes) - 1 - after))):
        yield flushes[chosen] + 1, chance.randint(flushes[chosen] + 1, flushes[chosen + 1])
