"""Write one snapshot into a store, in the order that makes it safe.

Register, look at what is there, store pieces, make them durable, commit, unregister: writers.py and retired.py say
why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType

from msgspec import structs

from gpucr.store import retired, snapshots
from gpucr.store.checks import Checks
from gpucr.store.codec import Compress
from gpucr.store.opened import Store
from gpucr.store.pieces import PieceRef
from gpucr.store.read_back import Why
from gpucr.store.stored_snapshot import Area, SetPart, StoredSnapshot
from gpucr.store.writer import StoreWriter
from gpucr.store.writers import REFRESH_S, Registration


class WriteSession:
    """A snapshot being written; a context manager. `commit` creates it; leaving without it discards it.

    ``writer`` takes the pieces (its `StoreWriter.add`, by many threads).
    """

    def __init__(self, registration: Registration, writer: StoreWriter, checks: Checks, why: Why) -> None:
        self.writer = writer
        self._checks = checks
        self._why: Why = why
        self._registration = registration
        self._has_ended = False

    @classmethod
    def begin(
        cls,
        store: Store,
        *,
        compress: Compress = "auto",
        checks: Checks | None = None,
        refresh_s: float = REFRESH_S,
        why: Why = "dump",
    ) -> WriteSession:
        """Register a new writer with the store, and read what is there already. ``checks``: see `StoreWriter`.

        ``why``: for the record of what was read.

        Raises StoreDamaged, StoreError, and Unsupported if the place cannot keep two writers apart.
        """
        registration = Registration.register(store, refresh_s=refresh_s)
        try:
            checks = checks if checks is not None else Checks()
            checks.begin(store, registration.clock_s)
            known = retired.known_index(store)
            return cls(registration, StoreWriter(store, known, compress=compress, checks=checks), checks, why)
        except BaseException:
            registration.end()
            raise

    def area(self, name: str, refs: Sequence[PieceRef]) -> Area:
        """A file, or the device memory of one process, made of these pieces. Raises StoreError."""
        return snapshots.make_area(name, refs, self.writer)

    def commit(
        self,
        *,
        name: str | None,
        manifest: bytes,
        areas: Iterable[Area],
        created: str | None = None,
        host: str | None = None,
        counters: Mapping[str, int] | None = None,
        part: SetPart | None = None,
    ) -> StoredSnapshot:
        """Make everything durable, then make the snapshot exist. Raises InvalidRequest, StoreError.

        ``created``, ``host`` and ``counters`` are those of the source if this is a copy.
        """
        if name is not None:
            snapshots.check_name(name)
        self.writer.flush()
        self._checks.note(self.writer.store, self._why)
        self._has_ended = True
        return snapshots.commit(
            self.writer.store,
            self._registration,
            name=name,
            manifest=manifest,
            areas=areas,
            created=created,
            host=host,
            counters=counters if counters is not None else structs.asdict(self.writer.counts),
            part=part,
        )

    def discard(self) -> None:
        """Give the snapshot up; a prune removes what was stored for it. Idempotent; does nothing after `commit`."""
        if not self._has_ended:
            self._has_ended = True
            self.writer.discard()
            self._registration.end()

    def __enter__(self) -> WriteSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()
