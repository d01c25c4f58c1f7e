"""Gets pieces out of a store: many at a time, in about the order asked, each one checked before it is handed over.

Neighbours in a pack are read with one request, also when they were not asked for one after the other: several threads
wrote side by side, so that what follows in memory is spread over some packs. The order is kept within a window.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from gpucr.errors import GpucrError
from gpucr.store import codec, pieces
from gpucr.store.backend import Buffer, Missing
from gpucr.store.crypto import Changed
from gpucr.store.index import Index
from gpucr.store.memory import AlignedBuffer, copy
from gpucr.store.opened import Store
from gpucr.store.pack import Place, bound, pack_name
from gpucr.store.pieces import PieceListError, PieceRef

THREADS = 16
RANGE_BYTES = 8 << 20
"""The most that is read with one request; every thread has a buffer of this size."""
_GAP_BYTES = 128 << 10
"""So much between two pieces is rather read than left out: a request costs more."""
_WINDOW_BYTES = 128 << 20

Deliver = Callable[[int, Buffer | None], None]


class _Wanted(NamedTuple):
    number: int
    ref: PieceRef
    place: Place


class _Group(NamedTuple):
    """What is handled at once: neighbours in a pack, or pieces of zeros by their numbers."""

    wanted: list[_Wanted]
    zeros: list[int]

    @property
    def size_bytes(self) -> int:
        return max(each.place.end for each in self.wanted) - self.wanted[0].place.offset if self.wanted else 0


class StoreReader:
    """Reads pieces of one store. All functions may be called by many threads at once."""

    def __init__(self, store: Store, index: Index, *, threads: int = THREADS) -> None:
        self.store = store
        self._index = index
        self._threads = threads

    def fetch(self, ref: PieceRef) -> Buffer:
        """One piece. Raises StoreDamaged, StoreError."""
        if ref.is_zero:
            return bytes(ref.length)
        place = self._place(ref)
        return self._piece(ref, place, memoryview(self._read_range(place)))

    def read(self, refs: Sequence[PieceRef], into: Sequence[memoryview]) -> None:
        """Fill each buffer, which is as long as its piece, with the piece. Raises StoreDamaged, StoreError."""
        if [len(buffer) for buffer in into] != [ref.length for ref in refs]:
            raise ValueError("the buffers are not as long as the pieces")

        def deliver(number: int, data: Buffer | None) -> None:
            copy(into[number], bytes(refs[number].length) if data is None else data)

        self.stream(refs, deliver)

    def read_all(self, refs: Sequence[PieceRef]) -> bytes:
        """The pieces one after the other, for things that are small enough. Raises StoreDamaged, StoreError."""
        whole = bytearray(sum(ref.length for ref in refs))
        view, parts, start = memoryview(whole), list[memoryview](), 0
        for ref in refs:
            parts.append(view[start : start + ref.length])
            start += ref.length
        self.read(refs, parts)
        return bytes(whole)

    def read_list(self, refs: Sequence[PieceRef]) -> list[PieceRef]:
        """What was given to `StoreWriter.add_list`. Raises StoreDamaged, StoreError."""
        try:
            return pieces.decode_list(self.read_all(refs))
        except PieceListError as e:
            raise self.store.damaged("packs/", f"has a list of pieces that is not valid: {e}") from e

    def stored_bytes(self, refs: Iterable[PieceRef]) -> int:
        """What these pieces take in their packs; one that is named twice is there once. Raises StoreDamaged."""
        return sum(self._place(ref).stored_length for ref in dict.fromkeys(refs) if not ref.is_zero)

    def stream(self, refs: Iterable[PieceRef], deliver: Deliver) -> None:
        """Hand over every piece, checked, with its number in the order of ``refs``; None: it is all zero.

        ``deliver`` is called by several threads at once, and the bytes are its own only until it returns. Earlier
        pieces come earlier, within a window. The first exception, also one of ``deliver``, ends it and is raised when
        all threads have ended.
        """
        _Stream(self, refs, deliver).run(self._threads)

    # --- for `_Stream` ---------------------------------------------------------------------------------------

    def groups(self, refs: Iterable[PieceRef]) -> Iterator[_Group]:
        """What to read with one request each."""
        numbered = enumerate(refs)
        count = max(1, _WINDOW_BYTES // self.store.config.piece_bytes)
        while window := list(islice(numbered, count)):
            zeros = [number for number, ref in window if ref.is_zero]
            if zeros:
                yield _Group([], zeros)
            wanted = [_Wanted(number, ref, self._place(ref)) for number, ref in window if not ref.is_zero]
            yield from sorted(_neighbours(wanted), key=lambda group: min(each.number for each in group.wanted))

    def hand_over(self, group: _Group, buffer: memoryview, deliver: Deliver) -> None:
        """Read one group, which fits into the buffer, and hand over its pieces."""
        for number in group.zeros:
            deliver(number, None)
        if not group.wanted:
            return
        start = group.wanted[0].place.offset
        name = pack_name(group.wanted[0].place.pack_id)
        try:
            count = self.store.backend.read_into(name, start, buffer[: group.size_bytes])
        except Missing as e:
            raise self.store.damaged(name, "is missing") from e
        except OSError as e:
            raise self.store.unreadable(name, e) from e
        data = buffer[:count]
        for number, ref, place in sorted(group.wanted):
            offset = place.offset - start
            deliver(number, self._piece(ref, place, data[offset : offset + place.stored_length]))

    # --- one piece -------------------------------------------------------------------------------------------

    def _place(self, ref: PieceRef) -> Place:
        place = self._index.find(ref.id)
        if place is None:
            raise self.store.damaged("packs/", f"lacks the piece {ref.id.hex()}: no pack in the index has it")
        if place.raw_length != ref.length:
            name = pack_name(place.pack_id)
            raise self.store.damaged(name, f"has {place.raw_length} bytes for a piece of {ref.length}")
        return place

    def _read_range(self, place: Place) -> bytes:
        name = pack_name(place.pack_id)
        try:
            return self.store.backend.read(name, place.offset, place.stored_length)
        except Missing as e:
            raise self.store.damaged(name, "is missing") from e
        except OSError as e:
            raise self.store.unreadable(name, e) from e

    def _piece(self, ref: PieceRef, place: Place, stored: memoryview) -> Buffer:
        name = pack_name(place.pack_id)
        if len(stored) < place.stored_length:
            end = place.offset + place.stored_length
            raise self.store.damaged(name, f"is cut short: it ends before byte {end}, where a piece of it ends")
        try:
            data: Buffer = stored
            if self.store.keys is not None:
                cipher = self.store.keys.pack(place.pack_id)
                data = cipher.decrypt(place.block, stored, bound(ref.id, place.raw_length, place.encoding))
            data = codec.decode(data, place.encoding, place.raw_length)
            # What was encrypted is authenticated together with its name already.
            if self.store.keys is None and self.store.digest(data) != ref.id:
                raise Changed("it differs from its digest")
        except Changed as e:
            last = place.offset + place.stored_length
            raise self.store.damaged(
                name, f"differs from what was written, between bytes {place.offset} and {last}: {e}"
            ) from e
        return data


class _Stream:
    """One call of `StoreReader.stream`: threads that take groups until there are no more, or one of them fails."""

    def __init__(self, reader: StoreReader, refs: Iterable[PieceRef], deliver: Deliver) -> None:
        self._reader = reader
        self._deliver = deliver
        self._groups = reader.groups(refs)
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, count: int) -> None:
        begun = [group for group in (self._next(), self._next()) if group is not None]
        # One request needs no threads.
        others = count - 1 if len(begun) == 2 else 0
        threads = [
            threading.Thread(target=self._work, args=(begun[1:] if number == 0 else [],), name=f"store-reader-{number}")
            for number in range(others)
        ]
        for thread in threads:
            thread.start()
        self._work(begun if not threads else begun[:1])
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _work(self, begun: list[_Group]) -> None:
        buffer = AlignedBuffer(RANGE_BYTES)
        try:
            while (group := begun.pop(0) if begun else self._next()) is not None:
                if group.size_bytes > len(buffer):  # a single piece that is larger than what is read at once
                    buffer = AlignedBuffer(group.size_bytes)
                self._reader.hand_over(group, buffer.view, self._deliver)
        except BaseException as e:  # noqa: BLE001 - whatever it is, `run` raises it when all threads have ended
            with self._lock:
                self._error = self._error or e

    def _next(self) -> _Group | None:
        with self._lock:
            if self._error is not None:
                return None
            try:
                return next(self._groups, None)
            except GpucrError as e:
                self._error = e
                return None


def _neighbours(wanted: Sequence[_Wanted]) -> Iterator[_Group]:
    group: list[_Wanted] = []
    for each in sorted(wanted, key=lambda item: (item.place.pack_id, item.place.block)):
        if group and not _fits(group, each.place):
            yield _Group(group, [])
            group = []
        group.append(each)
    if group:
        yield _Group(group, [])


def _fits(group: list[_Wanted], place: Place) -> bool:
    first, last = group[0].place, group[-1].place
    return (
        place.pack_id == first.pack_id
        and place.offset <= last.end + _GAP_BYTES
        and max(place.end, last.end) - first.offset <= RANGE_BYTES
    )
