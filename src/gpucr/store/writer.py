"""Puts pieces into a store: each one once, compressed where it pays, in packs that many threads fill side by side.

A writer first publishes packs, then the index that tells of them. What refers to its pieces (a snapshot) is created
after `StoreWriter.flush` has returned. So whatever moment it dies in, nothing refers to what is not there: what it left
is packs that no snapshot needs, which a prune removes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial

from gpucr.errors import StoreError
from gpucr.store import index as indexes
from gpucr.store import pieces
from gpucr.store.backend import Buffer
from gpucr.store.codec import Codec, Compress, Encoding
from gpucr.store.crypto import TAG_BYTES
from gpucr.store.index import Index
from gpucr.store.lanes import LANES, Lanes
from gpucr.store.memory import AlignedBuffer
from gpucr.store.opened import Store
from gpucr.store.pace import Pace
from gpucr.store.pack import PackContents, padded
from gpucr.store.pieces import ZERO_ID, PieceRef
from gpucr.store.reader import StoreReader


@dataclass(frozen=True)
class WriteCounts:
    """What a writer has seen and done, in bytes.

    ``bytes_seen`` were given to it: ``zero_bytes`` were all zero, ``known_bytes`` were in the store or in the writer
    already; the rest was stored, ``compressed_saved_bytes`` less by compression. ``bytes_written`` is what the packs
    that were published have in all, padding and footers included.
    """

    bytes_seen: int = 0
    zero_bytes: int = 0
    known_bytes: int = 0
    compressed_saved_bytes: int = 0
    bytes_written: int = 0


class StoreWriter:
    """Stores pieces. `add` from as many threads as wanted; `flush` when all that are needed have returned.

    ``known`` is the index of what need not be stored again; nothing is looked up elsewhere. An error in one thread is
    final: this and every later call raise it, and `flush` never succeeds. `discard` ends a writer that is not to be
    flushed.
    """

    def __init__(
        self,
        store: Store,
        known: Index,
        *,
        compress: Compress = "auto",
        lanes: int = LANES,
    ) -> None:
        self.store = store
        self._known = known
        self._codec = Codec(compress)
        self._pace = Pace() if compress == "auto" else None
        self._own = threading.local()
        self._lock = threading.Lock()
        self._new: set[bytes] = set()
        self._relied: dict[bytes, set[PieceRef]] = {}
        self._avoided: set[bytes] = set()
        self._unindexed: list[PackContents] = []
        self._published: list[PackContents] = []
        self._counts = WriteCounts()
        self._error: BaseException | None = None
        self._lanes = Lanes(store, lanes, self._finished)

    @property
    def counts(self) -> WriteCounts:
        """What was seen and done so far."""
        with self._lock:
            return self._counts

    @property
    def relied_packs(self) -> frozenset[bytes]:
        """The packs of others in which pieces are that were not stored again."""
        with self._lock:
            return frozenset(self._relied)

    @property
    def own_packs(self) -> frozenset[bytes]:
        """The packs that this writer has published."""
        with self._lock:
            return frozenset(contents.pack_id for contents in self._published)

    def add(self, buffer: Buffer) -> PieceRef:
        """Store one piece of 1 byte up to the store's piece size, if it is new; what to refer to it by.

        The buffer must not change meanwhile, and is the caller's again afterwards. Nothing is durable before `flush`.
        Raises StoreError.
        """
        data = memoryview(buffer)
        if not 0 < len(data) <= self.store.config.piece_bytes:
            raise ValueError(f"a piece of {len(data)} bytes in a store of pieces of {self.store.config.piece_bytes}")
        self._check()
        ref = PieceRef(self.name(data), len(data))
        if ref.is_zero:
            self._count(bytes_seen=ref.length, zero_bytes=ref.length)
        elif self._is_new(ref):
            self._failing(lambda: self._store(ref, data))
        return ref

    def name(self, buffer: Buffer) -> bytes:
        """The name that these bytes have as a piece. Nothing is stored, or counted."""
        data = memoryview(buffer)
        return ZERO_ID if pieces.is_zero(data) else self.store.digest(data)

    def add_all(self, buffer: Buffer) -> list[PieceRef]:
        """Store something of any length, cut into pieces. Raises StoreError."""
        return [self.add(piece) for piece in pieces.cut(buffer, self.store.config.piece_bytes)]

    def add_list(self, refs: Iterable[PieceRef]) -> list[PieceRef]:
        """Store a list of pieces as pieces, for `StoreReader.read_list`. Raises StoreError."""
        return self.add_all(pieces.encode_list(refs))

    def flush(self) -> None:
        """Make all that was added durable, and known to those who open the store from now on. Raises StoreError."""
        self._check()
        self._failing(self._flush)
        self._check()

    def store_again(self, pack_ids: Collection[bytes]) -> None:
        """Store what was relied on in these packs once more, because they will go away. Then `flush` again.

        Raises StoreDamaged where a piece cannot be read any more, and StoreError.
        """
        with self._lock:
            self._avoided.update(pack_ids)
            refs = [ref for pack_id in pack_ids for ref in self._relied.pop(pack_id, ())]
            # Not `known` any more; what several packs have is stored once.
            again = [ref for ref in dict.fromkeys(refs) if ref.id not in self._new]
            self._new.update(ref.id for ref in again)
        reader = StoreReader(self.store, self._known)
        for ref in again:
            self._failing(partial(self._copy, reader, ref))

    def discard(self) -> None:
        """End the writer, and leave away the packs that are not finished. Idempotent.

        Packs that are published stay: no one refers to them, and a prune removes them.
        """
        with self._lock:
            self._error = self._error or StoreError("the writer has ended", path=self.store.backend.url)
        self._lanes.discard()

    # --- one piece -------------------------------------------------------------------------------------------

    def _is_new(self, ref: PieceRef) -> bool:
        with self._lock:
            place = None
            if ref.id not in self._new:
                place = self._known.find(ref.id)
                if place is None or place.pack_id in self._avoided:
                    self._new.add(ref.id)
                    self._add_counts(bytes_seen=ref.length)
                    return True
                self._relied.setdefault(place.pack_id, set()).add(ref)
            self._add_counts(bytes_seen=ref.length, known_bytes=ref.length)
            return False

    def _store(self, ref: PieceRef, data: memoryview) -> None:
        encoding, stored = self._encode(data)
        begin = time.perf_counter()
        with self._lanes.pack() as pack:
            length = pack.append(ref.id, ref.length, encoding, stored, self._scratch())
        if self._pace is not None:
            self._pace.written(length, time.perf_counter() - begin)
        self._count(compressed_saved_bytes=len(data) - len(stored))

    def _copy(self, reader: StoreReader, ref: PieceRef) -> None:
        self._store(ref, memoryview(reader.fetch(ref)))

    def _encode(self, data: memoryview) -> tuple[Encoding, Buffer]:
        choice = self._codec.choose(data)
        if choice.encoding is Encoding.RAW or (self._pace is not None and not self._pace.pays(choice)):
            return Encoding.RAW, data
        begin = time.perf_counter()
        encoding, stored = self._codec.encode(data, choice.encoding)
        if self._pace is not None:
            self._pace.compressed(choice.encoding, len(data), time.perf_counter() - begin)
        return encoding, stored

    def _scratch(self) -> AlignedBuffer:
        found: AlignedBuffer | None = getattr(self._own, "scratch", None)
        if found is None:
            found = self._own.scratch = AlignedBuffer(padded(self.store.config.piece_bytes + TAG_BYTES))
        return found

    # --- packs -----------------------------------------------------------------------------------------------

    def _finished(self, contents: PackContents) -> None:
        with self._lock:
            self._unindexed.append(contents)
            self._published.append(contents)
            self._add_counts(bytes_written=contents.size_bytes)

    def _flush(self) -> None:
        self._lanes.finish()
        with self._lock:
            packs, self._unindexed = self._unindexed, []
        indexes.publish(self.store, packs)

    # --- errors and counts -----------------------------------------------------------------------------------

    def _check(self) -> None:
        with self._lock:
            error = self._error
        if error is not None:
            raise error

    def _failing(self, work: Callable[[], None]) -> None:
        """Do it; what goes wrong is the end of this writer: a piece that others rely on may be missing."""
        try:
            try:
                work()
            except OSError as e:
                raise self.store.not_usable(e) from e
        except BaseException as e:
            with self._lock:
                self._error = self._error or e
            raise

    def _count(self, **more: int) -> None:
        with self._lock:
            self._add_counts(**more)

    def _add_counts(self, **more: int) -> None:
        self._counts = replace(self._counts, **{name: getattr(self._counts, name) + more[name] for name in more})
