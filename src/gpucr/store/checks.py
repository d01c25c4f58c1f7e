"""Check existing pieces of a store before relying on them instead of storing them again.

The index only says where a piece is. Reading it shows whether it is intact: disks rot, and a snapshot with a damaged
piece cannot be restored. So each piece is read once before something relies on it, unless that was done a short time
ago.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from gpucr.model import CHECK_KNOWN_S
from gpucr.store import read_back
from gpucr.store.memory import AlignedBuffer
from gpucr.store.opened import Store
from gpucr.store.pack import Place
from gpucr.store.pieces import PieceRef
from gpucr.store.read_back import Key, Why
from gpucr.store.reader import THREADS, StoreReader


class Checks:
    """Checks each piece once. Thread-safe, and usable by several writers in turn.

    ``trust``: assume that all are intact, without reading. ``known_s``: those that were read within this time, by the
    store's records (read_back.py).
    """

    def __init__(self, *, trust: bool = False, known_s: float = CHECK_KNOWN_S) -> None:
        self._trust = trust
        self._known_s = known_s
        self._known: frozenset[Key] = frozenset()
        self._began_s = 0.0
        self._noted: set[Place] = set()
        self._lock = threading.Lock()
        self._intact: set[Place] = set()
        self._read_bytes = 0
        self._own = threading.local()

    @property
    def read_bytes(self) -> int:
        """The uncompressed size of all pieces read."""
        with self._lock:
            return self._read_bytes

    def begin(self, store: Store, now_s: float) -> None:
        """A writer begins, at this time of the store's clock. Raises StoreError."""
        self._began_s = self._began_s or now_s
        if not self._trust:
            try:
                self._known = read_back.recent(store, self._known_s, now_s)
            except OSError as e:
                raise store.not_usable(e) from e

    def note(self, store: Store, why: Why) -> None:
        """A writer ends: record what was read since it began."""
        with self._lock:
            new = self._intact - self._noted
            self._noted |= new
        read_back.note(store, new, why=why, began_s=self._began_s)

    def is_intact(self, reader: StoreReader, ref: PieceRef, place: Place, content: memoryview | None = None) -> bool:
        """Whether the piece is intact there. ``content``: its content, if known, which saves the digest.

        Raises StoreError if the store's place does not work.
        """
        if self._trust or place in self._intact or read_back.key_of(place) in self._known:
            return True
        found = reader.is_intact(ref, place, self._buffer(place.end - place.offset), content)
        with self._lock:
            self._read_bytes += ref.length
            if found:
                self._intact.add(place)
        return found

    def damaged(
        self,
        reader: StoreReader,
        wanted: Iterable[tuple[PieceRef, Place]],
        on_intact: Callable[[PieceRef], None] | None = None,
    ) -> list[tuple[PieceRef, Place]]:
        """The damaged ones. ``on_intact`` gets each of the others. Raises StoreError."""
        in_order = sorted(wanted, key=lambda each: (each[1].pack_id, each[1].block))
        found: list[tuple[PieceRef, Place]] = []
        with ThreadPoolExecutor(THREADS, "store-checks") as pool:
            results = pool.map(lambda each: self.is_intact(reader, *each), in_order)
            try:
                for each, is_intact in zip(in_order, results, strict=True):
                    if not is_intact:
                        found.append(each)
                    elif on_intact is not None:
                        on_intact(each[0])
            except BaseException:
                pool.shutdown(cancel_futures=True)  # Ctrl-C reached this waiting thread
                raise
        return found

    def _buffer(self, size_bytes: int) -> memoryview:
        found: AlignedBuffer | None = getattr(self._own, "buffer", None)
        if found is None or len(found) < size_bytes:
            found = self._own.buffer = AlignedBuffer(size_bytes)
        return found.view[:size_bytes]
