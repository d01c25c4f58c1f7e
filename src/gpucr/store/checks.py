"""Checks of pieces that a store has already, before somebody relies on them instead of storing them again.

The index says that a piece is there. Only reading it shows whether it is still what was written: disks rot, and a
snapshot that relies on a damaged piece cannot be restored. So each piece is read once before something relies on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from gpucr.store.memory import AlignedBuffer
from gpucr.store.pack import Place
from gpucr.store.pieces import PieceRef
from gpucr.store.reader import THREADS, StoreReader


class Checks:
    """Finds out whether pieces are intact, each one once. May be used by many threads, and by several writers in turn.

    ``trust``: all count as intact, and none is read.
    """

    def __init__(self, *, trust: bool = False) -> None:
        self._trust = trust
        self._lock = threading.Lock()
        self._intact: set[Place] = set()
        self._read_bytes = 0
        self._own = threading.local()

    @property
    def read_bytes(self) -> int:
        """The size of all pieces that were read, before compression."""
        with self._lock:
            return self._read_bytes

    def is_intact(self, reader: StoreReader, ref: PieceRef, place: Place, content: memoryview | None = None) -> bool:
        """Whether the piece really lies there. ``content``: what it is, for who has it, which saves the digest.

        Raises StoreError where the place of the store does not work.
        """
        if self._trust or place in self._intact:
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
        """Those that are not intact. ``on_intact`` is told each of the others. Raises StoreError."""
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
                pool.shutdown(cancel_futures=True)  # Ctrl-C came here, to the thread that waits
                raise
        return found

    def _buffer(self, size_bytes: int) -> memoryview:
        found: AlignedBuffer | None = getattr(self._own, "buffer", None)
        if found is None or len(found) < size_bytes:
            found = self._own.buffer = AlignedBuffer(size_bytes)
        return found.view[:size_bytes]
