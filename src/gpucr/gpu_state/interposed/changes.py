"""What a process has changed since the first pass, kept while it runs again."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import mmap
from collections.abc import Sequence
from typing import NamedTuple

from gpucr.gpu_state.interposed.blocks import BlocksSource
from gpucr.interposer.vault import Shown, Vault, VaultFailed, in_parallel
from gpucr.linux.buffers import address_of, copy
from gpucr.model import DevicePart

_AT_ONCE_BYTES = 128 << 20


class Stretch(NamedTuple):
    """Neighbouring pieces: where they begin in the source, and their size."""

    start: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.size_bytes


def stretches(pieces: Sequence[int], piece_bytes: int, size_bytes: int) -> list[Stretch]:
    """These pieces, ascending, of a source of this size; at most 128 MiB each."""
    found: list[Stretch] = []
    for piece in pieces:
        start = piece * piece_bytes
        end = min(start + piece_bytes, size_bytes)
        if found and found[-1].end == start and end - found[-1].start <= _AT_ONCE_BYTES:
            found[-1] = Stretch(found[-1].start, end - found[-1].start)
        else:
            found.append(Stretch(start, end - start))
    return found


class Changes:
    """See `Source`: reads another one until some of its pieces are copied; then only those, from the copy."""

    def __init__(self, source: BlocksSource) -> None:
        self.part: DevicePart = source.part
        self.size_bytes: int = source.size_bytes
        self._source: BlocksSource | None = source
        self._kept: tuple[Stretch, ...] = ()
        self._starts: list[int] = []
        self._in_copy = [0]  # where each begins in the copy
        self._on_gpu: tuple[Vault, Shown] | None = None
        self._on_host: mmap.mmap | None = None

    def keep_on_gpu(self, kept: Sequence[Stretch], vault: Vault) -> bool:
        """Copy these to memory of this vault. False: it has no room, or another GPU has some of them."""
        source = self._begin(kept)
        places = [source.on_one_gpu(*each) for each in kept]
        if any(place is None or place[0] is not vault for place in places):
            return False
        if kept:
            try:
                room = vault.make(self._in_copy[-1])
            except VaultFailed:
                return False
            self._on_gpu = vault, room
            in_parallel([
                functools.partial(vault.copy_on_device, room.address + to, place[1], each.size_bytes)
                for each, place, to in zip(kept, places, self._in_copy, strict=False)
                if place is not None
            ])  # fmt: skip
        self._source = None
        return True

    def keep_on_host(self, kept: Sequence[Stretch]) -> None:
        """Copy these to host memory. Raises VaultFailed, OSError."""
        source = self._begin(kept)
        if kept:
            self._on_host = mmap.mmap(-1, self._in_copy[-1], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
                self._on_host.madvise(mmap.MADV_HUGEPAGE)
            address = address_of(memoryview(self._on_host))
            in_parallel([
                functools.partial(source.copy_some, each.start, each.size_bytes, address + to)
                for each, to in zip(kept, self._in_copy, strict=False)
            ])  # fmt: skip
        self._source = None

    def _begin(self, kept: Sequence[Stretch]) -> BlocksSource:
        if self._source is None:
            raise ValueError("the changes are kept already")
        self._kept = tuple(kept)
        self._starts = [each.start for each in kept]
        self._in_copy = [0, *itertools.accumulate(each.size_bytes for each in kept)]
        return self._source

    def read_into(self, position: int, data: memoryview) -> None:
        """From the source, or the copy. Raises ValueError for a piece that was not kept."""
        if (source := self._source) is not None:
            source.read_into(position, data)
            return
        number = bisect.bisect_right(self._starts, position) - 1
        if number < 0 or position + len(data) > self._kept[number].end:
            raise ValueError(f"the piece at {position} of process {self.part.pid} was not kept")
        within = self._in_copy[number] + position - self._kept[number].start
        if self._on_gpu is not None:
            vault, room = self._on_gpu
            vault.read_into(room.address + within, data)
        elif self._on_host is not None:
            copy(data, memoryview(self._on_host)[within : within + len(data)])

    def close(self) -> None:
        if self._on_gpu is not None:
            vault, room = self._on_gpu
            self._on_gpu = None
            vault.forget(room)
        if self._on_host is not None:
            self._on_host.close()
            self._on_host = None
