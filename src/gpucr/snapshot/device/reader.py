"""Reads a snapshot's device memory back, in ascending order, after checking each piece."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from itertools import groupby, zip_longest
from typing import NamedTuple, Protocol, runtime_checkable

from gpucr.gpu_state.source import Destination
from gpucr.model import DevicePart


class Piece(NamedTuple):
    """A piece of device memory: its part, and its number in it."""

    part: DevicePart
    number: int


class PartDigests(NamedTuple):
    """BLAKE3 digests of a part's pieces, which all have this size but the last; ``key``: of keyed ones.

    32 zero bytes: zeros.
    """

    piece_bytes: int
    key: bytes | None
    digests: Sequence[bytes]


@runtime_checkable
class ChecksItself(Protocol):
    """A destination that can tell what it holds from what it should, faster than the processors."""

    def differing(self, piece_bytes: int, key: bytes | None, digests: Sequence[bytes]) -> list[int]:
        """When all is written: the pieces that have other digests, or whose are not known. Raises GpucrError."""


Deliver = Callable[[int, bytes | bytearray | memoryview | None], None]


class StoredPieces(Protocol):
    """Where the pieces of device memory are stored: a folder (`FolderPieces`) or a store (`StorePieces`).

    The counterpart of a `DeviceSink`.
    """

    def starts(self, part: DevicePart) -> Sequence[int]:
        """The start of each piece of this part, and the end of the last."""

    def is_zero(self, piece: Piece) -> bool:
        """Whether it is recorded as zeros."""

    def digests(self, part: DevicePart) -> PartDigests | None:
        """For a destination that checks itself; None: not known, or not needed."""

    def stream(self, wanted: Sequence[Piece], deliver: Deliver, unchecked: Collection[DevicePart] = ()) -> None:
        """Deliver every checked piece with its index in ``wanted``; None: all zero. Earlier ones first.

        Pieces of the ``unchecked`` parts are not compared with their digests.

        ``deliver`` is called by several threads at once, and may use the bytes only until it returns. The first
        exception, also from ``deliver``, ends it and is raised when all threads have ended.
        """

    def close(self) -> None:
        """Stop reading. Idempotent."""


class DeviceReader:
    """Fills the destinations of several processes from a snapshot, with many threads.

    The processes take turns, so the first pieces of all come first; the driver's level 0 comes before the backends
    above it. What a destination can check itself is not checked on the way there. ``pieces`` is closed when all is read
    or reading has ended. The first error ends it, and every later wait raises it. Raises ValueError for a destination
    that is too small.
    """

    def __init__(self, pieces: StoredPieces, destinations: Sequence[Destination]) -> None:
        self._pieces = pieces
        self._loadings = {each.part: _Loading(each, pieces) for each in destinations}
        self._order = _in_turns([loading.wanted(pieces) for loading in self._loadings.values()])
        self._unchecked = {part for part, loading in self._loadings.items() if loading.digests is not None}
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._has_ended = False
        self._is_cancelled = False
        self._local = threading.local()  # `delivers` in the threads that read
        self._thread = threading.Thread(target=self._run, name="device-reader", daemon=True)

    def start(self) -> None:
        """Begin to read, in threads of its own."""
        if self._order or self._unchecked:
            self._thread.start()
        else:
            self._run()

    def loaded(self, part: DevicePart) -> int:
        """How many bytes from the beginning of this part are in place and checked."""
        with self._changed:
            return self._loadings[part].loaded_bytes

    @property
    def loaded_bytes(self) -> int:
        """How much of all parts is in its destination, in bytes."""
        with self._changed:
            return sum(loading.loaded_bytes for loading in self._loadings.values())

    def wait_for(self, part: DevicePart, up_to_bytes: int, timeout_s: float | None = None) -> bool:
        """Wait until `loaded` is at least this. False: out of time, or cancelled. Raises the first error."""
        loading = self._loadings[part]
        wanted = min(up_to_bytes, loading.starts[-1])
        return self._wait(lambda: loading.loaded_bytes >= wanted, timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is in place. False: out of time, or cancelled. Raises the first error."""
        return self._wait(
            lambda: all(each.loaded_bytes == each.starts[-1] for each in self._loadings.values()), timeout_s
        )

    def cancel(self) -> None:
        """End the threads after their current piece. Idempotent.

        Called from one of the threads, it does not wait: another one may be doing the same.
        """
        self._is_cancelled = True
        if getattr(self._local, "delivers", False):
            return
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._end()

    def _wait(self, reached: Callable[[], bool], timeout_s: float | None) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or reached(), timeout_s)
            if self._error is not None:
                raise self._error
            return reached()

    def _run(self) -> None:
        try:
            self._pieces.stream(self._order, self._deliver, self._unchecked)
            for part in self._unchecked:
                self._check(self._loadings[part])
        except _Cancelled:
            pass
        except BaseException as e:  # noqa: BLE001 - any error must reach the waiter
            self._error = e
        self._end()

    def _end(self) -> None:
        self._pieces.close()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _check(self, loading: _Loading) -> None:
        """What differs is read once more, checked on the way: that finds another copy, or says what is damaged."""
        destination, digests = loading.destination, loading.digests
        if digests is None or not isinstance(destination, ChecksItself):
            return  # it was checked as it was read
        wrong = [Piece(destination.part, number) for number in destination.differing(*digests)]

        def deliver(place: int, data: bytes | bytearray | memoryview | None) -> None:
            self._write(loading, wrong[place], data)

        if wrong:
            self._pieces.stream(wrong, deliver)
        with self._changed:
            loading.digests = None
            self._changed.notify_all()

    @staticmethod
    def _write(loading: _Loading, piece: Piece, data: bytes | bytearray | memoryview | None) -> None:
        start, end = loading.starts[piece.number], loading.starts[piece.number + 1]
        loading.destination.write_from(start, memoryview(bytes(end - start) if data is None else data))

    def _deliver(self, place: int, data: bytes | bytearray | memoryview | None) -> None:
        self._local.delivers = True
        if self._is_cancelled:
            raise _Cancelled
        piece = self._order[place]
        loading = self._loadings[piece.part]
        self._write(loading, piece, data)
        with self._changed:
            if loading.finish(piece.number):
                self._changed.notify_all()


class _Cancelled(Exception):
    """The rest is not needed."""


class _Loading:
    """One part's progress: which pieces are in place, and the length of the complete prefix."""

    def __init__(self, destination: Destination, pieces: StoredPieces) -> None:
        self.destination = destination
        self.starts = pieces.starts(destination.part)
        if destination.size_bytes < self.starts[-1]:
            pid = destination.part.pid
            raise ValueError(f"the place for the device memory of process {pid} is shorter than its device memory")
        self.digests = pieces.digests(destination.part) if isinstance(destination, ChecksItself) else None
        self._finished = bytearray(len(self.starts) - 1)
        self._prefix = 0

    @property
    def loaded_bytes(self) -> int:
        whole = self._prefix == len(self._finished) > 0
        return self.starts[self._prefix - 1 if whole and self.digests is not None else self._prefix]

    def wanted(self, pieces: StoredPieces) -> list[Piece]:
        """The pieces to read; zeros are skipped if the destination starts as zeros."""
        all_pieces = [Piece(self.destination.part, number) for number in range(len(self._finished))]
        if not self.destination.is_zeroed:
            return all_pieces
        zeros = [piece for piece in all_pieces if pieces.is_zero(piece)]
        for piece in zeros:
            self.finish(piece.number)
        return [piece for piece in all_pieces if not self._finished[piece.number]]

    def finish(self, number: int) -> bool:
        """Mark this piece as in place. Returns whether the prefix has grown."""
        self._finished[number] = True
        if number != self._prefix:
            return False
        gap = self._finished.find(0, number)
        self._prefix = len(self._finished) if gap < 0 else gap
        return True


def _in_turns(wanted: Sequence[Sequence[Piece]]) -> list[Piece]:
    by_level = sorted((pieces for pieces in wanted if pieces), key=lambda pieces: pieces[0].part.level)
    levels = groupby(by_level, key=lambda pieces: pieces[0].part.level)
    return [piece for _, level in levels for turn in zip_longest(*level) for piece in turn if piece is not None]
