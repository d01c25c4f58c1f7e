"""Read pieces from a store: many at a time, roughly in the requested order, each checked before delivery.

Neighbours in a pack are read with one request, even if they are not adjacent in the requested order: threads write in
parallel, so adjacent memory is spread over several packs. The order is kept within a window.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from gpucr.errors import GpucrError, StoreDamaged
from gpucr.linux.buffers import copy
from gpucr.store import codec, pieces
from gpucr.store.backend import Buffer, Missing
from gpucr.store.crypto import Changed
from gpucr.store.index import Index
from gpucr.store.memory import AlignedBuffer, is_equal
from gpucr.store.opened import Store
from gpucr.store.pack import Place, bound, pack_name
from gpucr.store.pieces import PieceListError, PieceRef

THREADS = 16
RANGE_BYTES = 8 << 20
"""Maximum per request; every thread has a buffer of this size."""
_GAP_BYTES = 128 << 10
"""Gaps up to this size between two pieces are read too: another request costs more."""
_WINDOW_BYTES = 128 << 20
MAX_READ_BYTES = _WINDOW_BYTES + THREADS * RANGE_BYTES
"""Maximum data held."""

Deliver = Callable[[int, Buffer | None], None]
OnDamaged = Callable[[int, StoreDamaged], None]


class _Wanted(NamedTuple):
    number: int
    ref: PieceRef
    place: Place


class _Group(NamedTuple):
    """A unit of work: neighbours in a pack, or zero pieces by number."""

    wanted: list[_Wanted]
    zeros: list[int]

    @property
    def size_bytes(self) -> int:
        return max(each.place.end for each in self.wanted) - self.wanted[0].place.offset if self.wanted else 0


class StoreReader:
    """Reads pieces of one store. Thread-safe."""

    def __init__(self, store: Store, index: Index, *, threads: int = THREADS) -> None:
        self.store = store
        self._index = index
        self._threads = threads

    def fetch(self, ref: PieceRef) -> Buffer:
        """One piece. Raises StoreDamaged, StoreError."""
        if ref.is_zero:
            return bytes(ref.length)
        return self._first_intact(ref, self._places(ref)[0], None)

    def is_intact(self, ref: PieceRef, place: Place, buffer: memoryview, content: memoryview | None) -> bool:
        """Whether the piece is intact at this one place. Reads it into the buffer, bypassing the page cache.

        Compares it with the given content, or else with its digest. Raises StoreError if the store's place does not
        work.
        """
        if place.raw_length != ref.length:
            return False
        try:
            stored = buffer[: self._read_into(pack_name(place.pack_id), place.offset, buffer)][: place.stored_length]
            if content is not None:
                return is_equal(self._decoded(ref, place, stored), content)
            self._piece(ref, place, stored)
        except StoreDamaged:
            return False
        return True

    def read(self, refs: Sequence[PieceRef], into: Sequence[memoryview]) -> None:
        """Read each piece into its buffer, which has the same length. Raises StoreDamaged, StoreError."""
        if [len(buffer) for buffer in into] != [ref.length for ref in refs]:
            raise ValueError("the buffers are not as long as the pieces")

        def deliver(number: int, data: Buffer | None) -> None:
            copy(into[number], bytes(refs[number].length) if data is None else data)

        self.stream(refs, deliver)

    def read_all(self, refs: Sequence[PieceRef]) -> bytes:
        """The concatenated pieces, for small data. Raises StoreDamaged, StoreError."""
        whole = bytearray(sum(ref.length for ref in refs))
        view, parts, start = memoryview(whole), list[memoryview](), 0
        for ref in refs:
            parts.append(view[start : start + ref.length])
            start += ref.length
        self.read(refs, parts)
        return bytes(whole)

    def read_list(self, refs: Sequence[PieceRef]) -> list[PieceRef]:
        """The inverse of `StoreWriter.add_list`. Raises StoreDamaged, StoreError."""
        try:
            return pieces.decode_list(self.read_all(refs))
        except PieceListError as e:
            raise self.store.damaged("packs/", f"has a list of pieces that is not valid: {e}") from e

    def stored_bytes(self, refs: Iterable[PieceRef]) -> int:
        """The stored size of these pieces; duplicates count once. Raises StoreDamaged."""
        return sum(self._places(ref)[0].stored_length for ref in dict.fromkeys(refs) if not ref.is_zero)

    def stream(
        self,
        refs: Iterable[PieceRef],
        deliver: Deliver,
        on_damaged: OnDamaged | None = None,
        *,
        unchecked: Container[int] = (),
    ) -> None:
        """Deliver every checked piece with its index in ``refs``; None: all zero.

        ``deliver`` is called by several threads at once, and may use the bytes only until it returns. Pieces come
        roughly in order, within a window. The first exception, also from ``deliver``, ends it and is raised when all
        threads have ended. The ``unchecked`` ones are not compared with their digests. With ``on_damaged``, that is
        called for an unreadable piece instead, and the others follow.
        """
        _Stream(self, refs, deliver, on_damaged, unchecked).run(self._threads)

    # --- for `_Stream` ---------------------------------------------------------------------------------------

    def groups(self, refs: Iterable[PieceRef], on_damaged: OnDamaged | None) -> Iterator[_Group]:
        """Groups to read with one request each."""
        numbered = enumerate(refs)
        count = max(1, _WINDOW_BYTES // self.store.config.piece_bytes)
        while window := list(islice(numbered, count)):
            zeros = [number for number, ref in window if ref.is_zero]
            if zeros:
                yield _Group([], zeros)
            wanted = []
            for number, ref in window:
                if not ref.is_zero:
                    try:
                        wanted.append(_Wanted(number, ref, self._places(ref)[0]))
                    except StoreDamaged as e:
                        _tell(on_damaged, number, e)
            yield from sorted(_neighbours(wanted), key=lambda group: min(each.number for each in group.wanted))

    def hand_over(
        self,
        group: _Group,
        buffer: memoryview,
        deliver: Deliver,
        on_damaged: OnDamaged | None,
        unchecked: Container[int],
    ) -> None:
        """Read one group, which fits into the buffer, and deliver its pieces."""
        for number in group.zeros:
            deliver(number, None)
        if not group.wanted:
            return
        start = group.wanted[0].place.offset
        data: memoryview | None = None
        with suppress(StoreDamaged):  # perhaps one bad sector: read the others separately
            name = pack_name(group.wanted[0].place.pack_id)
            data = buffer[: self._read_into(name, start, buffer[: group.size_bytes])]
        for number, ref, place in sorted(group.wanted):
            offset = place.offset - start
            try:
                stored = None if data is None else data[offset : offset + place.stored_length]
                piece = self._first_intact(ref, place, stored, is_checked=number not in unchecked)
            except StoreDamaged as e:
                _tell(on_damaged, number, e)
                continue
            deliver(number, piece)

    # --- one piece -------------------------------------------------------------------------------------------

    def _places(self, ref: PieceRef) -> Sequence[Place]:
        """All places of the piece, at least one. Raises StoreDamaged."""
        found = self._index.places(ref.id)
        if not found:
            raise self.store.damaged("packs/", f"lacks the piece {ref.id.hex()}: no pack in the index has it")
        places = [place for place in found if place.raw_length == ref.length]
        if not places:
            name = pack_name(found[0].pack_id)
            raise self.store.damaged(name, f"has {found[0].raw_length} bytes for a piece of {ref.length}")
        return places

    def _first_intact(
        self, ref: PieceRef, first: Place, stored: memoryview | None, *, is_checked: bool = True
    ) -> Buffer:
        """The piece, whose first place holds ``stored`` (None: not read yet), or else another intact copy.

        Raises StoreDamaged if there is none.
        """
        try:
            data = self._read_range(first) if stored is None else stored
            return self._piece(ref, first, data) if is_checked else self._decoded(ref, first, data)
        except StoreDamaged:
            for place in self._places(ref)[1:]:
                with suppress(StoreDamaged):
                    return self._piece(ref, place, self._read_range(place))
            raise

    def _read_range(self, place: Place) -> memoryview:
        data = bytearray(place.stored_length)
        view = memoryview(data)
        return view[: self._read_into(pack_name(place.pack_id), place.offset, view)]

    def _read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        try:
            return self.store.backend.read_into(name, offset, buffer)
        except Missing as e:
            raise self.store.damaged(name, "is missing") from e
        except OSError as e:
            raise self.store.unreadable(name, e) from e

    def _piece(self, ref: PieceRef, place: Place, stored: memoryview) -> Buffer:
        data = self._decoded(ref, place, stored)
        # Encrypted pieces are already authenticated together with their name.
        if self.store.keys is None and self.store.digest(data) != ref.id:
            raise self._differs(place, "it differs from its digest")
        return data

    def _decoded(self, ref: PieceRef, place: Place, stored: memoryview) -> Buffer:
        if len(stored) < place.stored_length:
            end = place.offset + place.stored_length
            what = f"is cut short: it ends before byte {end}, where a piece of it ends"
            raise self.store.damaged(pack_name(place.pack_id), what)
        try:
            data: Buffer = stored
            if self.store.keys is not None:
                cipher = self.store.keys.pack(place.pack_id)
                data = cipher.decrypt(place.block, stored, bound(ref.id, place.raw_length, place.encoding))
            return codec.decode(data, place.encoding, place.raw_length)
        except Changed as e:
            raise self._differs(place, str(e)) from e

    def _differs(self, place: Place, why: str) -> StoreDamaged:
        last = place.offset + place.stored_length
        what = f"differs from what was written, between bytes {place.offset} and {last}: {why}"
        return self.store.damaged(pack_name(place.pack_id), what)


def _tell(on_damaged: OnDamaged | None, number: int, error: StoreDamaged) -> None:
    if on_damaged is None:
        raise error
    on_damaged(number, error)


class _Stream:
    """One call of `StoreReader.stream`: threads that take groups until there are no more, or one of them fails."""

    def __init__(
        self,
        reader: StoreReader,
        refs: Iterable[PieceRef],
        deliver: Deliver,
        on_damaged: OnDamaged | None,
        unchecked: Container[int],
    ) -> None:
        self._reader = reader
        self._deliver = deliver
        self._on_damaged = on_damaged
        self._unchecked = unchecked
        self._groups = reader.groups(refs, on_damaged)
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, count: int) -> None:
        threads: list[threading.Thread] = []
        own = self._next()
        # A single request needs no thread: start as many as there are concurrent requests.
        while len(threads) < count - 1 and own is not None and (following := self._next()) is not None:
            threads.append(threading.Thread(target=self._work, args=([own],), name=f"store-reader-{len(threads)}"))
            threads[-1].start()
            own = following
        self._work([own] if own is not None else [])
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _work(self, begun: list[_Group]) -> None:
        buffer = AlignedBuffer(RANGE_BYTES)
        try:
            while (group := begun.pop(0) if begun else self._next()) is not None:
                if group.size_bytes > len(buffer):  # a single piece larger than the maximum
                    buffer = AlignedBuffer(group.size_bytes)
                self._reader.hand_over(group, buffer.view, self._deliver, self._on_damaged, self._unchecked)
        except BaseException as e:  # noqa: BLE001 - `run` raises any error when all threads have ended
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
