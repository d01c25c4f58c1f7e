"""Write pieces into a store: each once, compressed if it pays, in packs filled by many threads in parallel.

A writer first publishes packs, then the index that lists them. A snapshot that refers to its pieces is created after
`StoreWriter.flush` has returned. So if it dies, nothing refers to a missing piece: it leaves only unneeded packs, which
a prune removes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from gpucr.errors import StoreError
from gpucr.store import index as indexes
from gpucr.store import pieces, retired
from gpucr.store.backend import Buffer
from gpucr.store.checks import Checks
from gpucr.store.codec import Codec, Compress, Encoding
from gpucr.store.crypto import TAG_BYTES
from gpucr.store.index import Index
from gpucr.store.lanes import LANES, Lanes
from gpucr.store.memory import AlignedBuffer
from gpucr.store.opened import Store
from gpucr.store.pace import Pace
from gpucr.store.pack import Place, padded
from gpucr.store.pieces import ZERO_ID, PieceRef
from gpucr.store.reader import StoreReader


class WriteCounts(Struct, frozen=True):
    """A writer's counters, in bytes.

    ``seen_bytes`` were given to it: ``zero_bytes`` were all zero, ``known_bytes`` were in the store or in the writer
    already; the rest was stored, ``compressed_saved_bytes`` less by compression. ``written_bytes`` is the total size of
    published packs, including padding and footers. Of the data already in the store, ``checked_bytes`` were read, and
    ``repaired_bytes`` were damaged and stored again.
    """

    seen_bytes: int = 0
    zero_bytes: int = 0
    known_bytes: int = 0
    checked_bytes: int = 0
    repaired_bytes: int = 0
    compressed_saved_bytes: int = 0
    written_bytes: int = 0


class StoreWriter:
    """Stores pieces. Call `add` from any number of threads, and `flush` after all have returned.

    ``known`` is the index of what need not be stored again. Each such piece is read and compared before it is relied
    on, unless ``checks`` has done so. A damaged one is stored again, and `flush` retires its old pack. An error in one
    thread is final: this and every later call raise it, and `flush` never succeeds. `discard` ends a writer without
    flushing.
    """

    def __init__(
        self,
        store: Store,
        known: Index,
        *,
        compress: Compress = "auto",
        checks: Checks | None = None,
        lanes: int = LANES,
    ) -> None:
        self.store = store
        self._known = known
        self._codec = Codec(compress)
        self._pace = Pace() if compress == "auto" else None
        self._own = threading.local()
        self._lock = threading.Lock()
        self._checks = checks if checks is not None else Checks()
        self._reader = StoreReader(store, known)
        self._added: set[bytes] = set()
        self._damaged: set[bytes] = set()
        self._retired: set[bytes] = set()
        self._counts = WriteCounts()
        self._error: BaseException | None = None
        self._lanes = Lanes(store, lanes)

    @property
    def counts(self) -> WriteCounts:
        with self._lock:
            return replace(self._counts, checked_bytes=self._checks.read_bytes, written_bytes=self._lanes.written_bytes)

    def add(self, buffer: Buffer) -> PieceRef:
        """Store one piece of 1 byte up to the store's piece size, if it is new. Returns its reference.

        The buffer must not change meanwhile; the caller may reuse it afterwards. Nothing is durable before `flush`.
        Raises StoreError.
        """
        data = memoryview(buffer)
        if not 0 < len(data) <= self.store.config.piece_bytes:
            raise ValueError(f"a piece of {len(data)} bytes in a store of pieces of {self.store.config.piece_bytes}")
        self._check()
        ref = PieceRef(self.name(data), len(data))
        if ref.is_zero:
            self._count(seen_bytes=ref.length, zero_bytes=ref.length)
        elif self._is_first(ref):
            self._failing(lambda: self._add(ref, data))
        return ref

    def rely(self, ref: PieceRef) -> bool:
        """Whether this piece need not be added: it is zeros, in the store and intact, or added already.

        Raises StoreError.
        """
        self._check()
        if ref.is_zero:
            self._count(seen_bytes=ref.length, zero_bytes=ref.length)
            return True
        with self._lock:
            is_added = ref.id in self._added
        place = None if is_added else self._known_place(ref)
        if place is not None and not self._is_intact(ref, place):
            self._give_up(ref, place)
            place = None
        if not is_added and place is None:
            return False
        self._count(seen_bytes=ref.length, known_bytes=ref.length)
        return True

    def _is_intact(self, ref: PieceRef, place: Place) -> bool:
        found: list[bool] = []
        self._failing(lambda: found.append(self._checks.is_intact(self._reader, ref, place)))
        return found[0]

    def name(self, buffer: Buffer) -> bytes:
        """The name of these bytes as a piece. Nothing is stored or counted."""
        data = memoryview(buffer)
        return ZERO_ID if pieces.is_zero(data) else self.store.digest(data)

    def add_all(self, buffer: Buffer) -> list[PieceRef]:
        """Store data of any length, cut into pieces. Raises StoreError."""
        return [self.add(piece) for piece in pieces.cut(buffer, self.store.config.piece_bytes)]

    def add_list(self, refs: Iterable[PieceRef]) -> list[PieceRef]:
        """Store a list of pieces as pieces, for `StoreReader.read_list`. Raises StoreError."""
        return self.add_all(pieces.encode_list(refs))

    def flush(self) -> None:
        """Make everything added durable, and visible to those who open the store from now on. Raises StoreError."""
        self._check()
        self._failing(self._flush)
        self._check()

    def rely_on(self, refs: Iterable[PieceRef], on_relied: Callable[[PieceRef], None]) -> list[PieceRef]:
        """Rely on existing pieces, each named once. Returns those that are missing or damaged, which must be added.

        ``on_relied`` gets each of the others. Raises StoreError.
        """
        self._check()
        missing: list[PieceRef] = []
        known: list[tuple[PieceRef, Place]] = []
        for ref in refs:
            place = self._known_place(ref)
            if place is None:
                missing.append(ref)
            else:
                known.append((ref, place))

        def relied(ref: PieceRef) -> None:
            self._count(seen_bytes=ref.length, known_bytes=ref.length)
            on_relied(ref)

        for ref, place in self._checks.damaged(self._reader, known, relied):
            self._give_up(ref, place)
            missing.append(ref)
        return missing

    def discard(self) -> None:
        """End the writer, and drop unfinished packs. Idempotent.

        Published packs stay: nothing refers to them, and a prune removes them.
        """
        with self._lock:
            self._error = self._error or StoreError("the writer has ended", path=self.store.backend.url)
        self._lanes.discard()

    # --- one piece -------------------------------------------------------------------------------------------

    def _is_first(self, ref: PieceRef) -> bool:
        with self._lock:
            if ref.id not in self._added:
                self._added.add(ref.id)
                return True
            self._add_counts(seen_bytes=ref.length, known_bytes=ref.length)
            return False

    def _add(self, ref: PieceRef, data: memoryview) -> None:
        place = self._known_place(ref)
        if place is not None:
            if self._checks.is_intact(self._reader, ref, place, data):
                self._count(seen_bytes=ref.length, known_bytes=ref.length)
                return
            self._give_up(ref, place)
        self._count(seen_bytes=ref.length)
        self._store(ref, data)

    def _known_place(self, ref: PieceRef) -> Place | None:
        """The place, according to the index, of a piece that need not be stored again."""
        place = self._known.find(ref.id)
        return None if place is None or place.pack_id in self._damaged else place

    def _give_up(self, ref: PieceRef, place: Place) -> None:
        """This piece is damaged: do not rely on its pack any more."""
        with self._lock:
            self._damaged.add(place.pack_id)
            self._add_counts(repaired_bytes=ref.length)

    def _store(self, ref: PieceRef, data: memoryview) -> None:
        encoding, stored = self._encode(data)
        begin = time.perf_counter()
        with self._lanes.pack() as pack:
            length = pack.append(ref.id, ref.length, encoding, stored, self._scratch())
        if self._pace is not None:
            self._pace.written(length, time.perf_counter() - begin)
        self._count(compressed_saved_bytes=len(data) - len(stored))

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

    def _flush(self) -> None:
        self._lanes.finish()
        with self._lock:
            damaged = self._damaged - self._retired
            self._retired |= damaged
        indexes.publish(self.store, self._lanes.take_published())
        if damaged:
            # From now on the new copy is found before the damaged one, and no new writer relies on the latter.
            retired.retire(self.store, damaged)

    # --- errors and counts -----------------------------------------------------------------------------------

    def _check(self) -> None:
        with self._lock:
            error = self._error
        if error is not None:
            raise error

    def _failing(self, work: Callable[[], None]) -> None:
        """Do it; an error ends this writer: a piece that others rely on may be missing."""
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
