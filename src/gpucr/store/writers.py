"""Running writers: how they register, and how a dead one is kept from committing later.

A snapshot's name is chosen when the writing begins, and there is an object ``writers/NAME`` until the writer has ended.
Every minute it makes another one, ``writers/NAME-NUMBER``, in place of the last of these: it lives. ``prune`` considers
a writer dead if its records have not changed for long, and then creates a tombstone in place of that writer's snapshot.
Both are creates of one name, so exactly one of them happens: a writer that was only slow, or a machine that slept,
finds that it can no longer commit. This does not depend on clocks; they only decide when to do it.

A tombstone is a sealed object with that content. An empty object is what a broken file system leaves of a snapshot.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import threading
import time
from collections.abc import Mapping

from msgspec import Struct

from gpucr.errors import StoreError, Unsupported
from gpucr.store.backend import Backend, Exists
from gpucr.store.opened import Store

WRITERS_PREFIX = "writers/"
SNAPSHOTS_PREFIX = "snapshots/"
REFRESH_S = 60.0
_CLOCK_TOLERANCE_S = 5.0
"""Object stores report whole seconds, and a request takes a while: a clock this close is more accurate."""
_ID_BYTES = 16
_TOMBSTONE = b'{"format": "gpucr-tombstone", "version": 1}'
_RECORD = re.compile(r"writers/([0-9a-f]{32})(-\d{8})?")


class WriterSeen(Struct, frozen=True):
    """A writer in the store: its start and its latest sign of life, both by the store's clock."""

    snapshot_id: str
    records: tuple[str, ...]
    since_s: float
    seen_s: float


class Registration:
    """A writer's registration in the store, from before it reads the contents until after its commit.

    `register` makes one; `end` removes it. `clock_s` returns the store's time.
    """

    def __init__(self, store: Store, snapshot_id: str, *, refresh_s: float) -> None:
        self._store = store
        self._snapshot_id = snapshot_id
        self._refresh_s = refresh_s
        self._number = 0
        self._ahead_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_fresh, name="store-writer", daemon=True)

    @classmethod
    def register(cls, store: Store, *, refresh_s: float = REFRESH_S) -> Registration:
        """Register a new writer. Raises StoreError, and Unsupported if the place allows a name to be created twice."""
        made = cls(store, _new_id(), refresh_s=refresh_s)
        try:
            made._first_record()
        except OSError as e:
            raise store.not_usable(e) from e
        made._thread.start()
        return made

    @property
    def snapshot_id(self) -> str:
        """The name of the snapshot that this writer may commit."""
        return self._snapshot_id

    @property
    def snapshot_name(self) -> str:
        """The object that commits it."""
        return snapshot_object(self._snapshot_id)

    @property
    def clock_s(self) -> float:
        """Seconds since 1970 by the store's clock, shared by all its writers; may be some seconds behind."""
        return time.time() + self._ahead_s

    def refresh(self) -> None:
        """Show a sign of life. Raises OSError."""
        before = self._record_name
        self._number += 1
        self._store.backend.create(self._record_name, self._record())
        if self._number > 1:  # the first record stays: it shows the start
            self._store.backend.delete(before)

    def end(self) -> None:
        """End the registration: the writer has committed, or given up before trying. Idempotent.

        If that fails, its record grows old, which has the same effect later.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            for record in list(self._store.backend.list(f"{WRITERS_PREFIX}{self._snapshot_id}")):
                self._store.backend.delete(record.name)
        except OSError:
            return

    def abandon(self) -> None:
        """Stop without a word, after a commit that may still happen: only a tombstone will decide."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def _record_name(self) -> str:
        return f"{WRITERS_PREFIX}{self._snapshot_id}" + (f"-{self._number:08d}" if self._number else "")

    def _record(self) -> bytes:
        about = {"host": platform.node(), "pid": os.getpid()}
        return self._store.seal(self._record_name, json.dumps(about).encode())

    def _first_record(self) -> None:
        backend, record = self._store.backend, self._record()
        backend.create(self._record_name, record)
        try:
            backend.create(self._record_name, b"")
        except Exists:
            pass
        else:
            backend.delete(self._record_name)
            raise Unsupported(
                f"{backend.url} lets an object be overwritten although it was told not to: two dumps could destroy "
                "each other's snapshots there",
                hint="use a service that has conditional writes (If-None-Match), or a folder",
            )
        here_s = time.time()
        found = next(backend.list(self._record_name), None)
        if found is None:
            raise self.was_ended()
        ahead_s = found.modified_s - here_s
        if abs(ahead_s) > _CLOCK_TOLERANCE_S:
            self._ahead_s = ahead_s

    def was_ended(self) -> StoreError:
        """The error for a writer that was considered dead."""
        url = self._store.backend.url
        return StoreError(
            f"the snapshot cannot be completed: a prune of {url} took this dump for dead",
            path=self._store.path(self.snapshot_name),
            hint="dump again; prune with a longer --dead-after if dumps stand still for so long",
        )

    def _keep_fresh(self) -> None:
        while not self._stop.wait(self._refresh_s):
            try:
                self.refresh()
            except OSError:
                continue  # the commit will report a permanent failure


def _new_id() -> str:
    return os.urandom(_ID_BYTES).hex()


def snapshot_id_of(text: str) -> str | None:
    """The snapshot id in a snapshot object's name; None: not a snapshot's name."""
    found = re.fullmatch(r"snapshots/([0-9a-f]{32})", text)
    return found.group(1) if found else None


def snapshot_object(snapshot_id: str) -> str:
    """The name of the object that commits this snapshot."""
    return f"{SNAPSHOTS_PREFIX}{snapshot_id}"


def seen(backend: Backend) -> Mapping[str, WriterSeen]:
    """All registered writers, by snapshot id. Raises OSError."""
    found: dict[str, WriterSeen] = {}
    for info in backend.list(WRITERS_PREFIX):
        if match := _RECORD.fullmatch(info.name):
            at_s = info.modified_s
            before = found.get(match.group(1), WriterSeen(match.group(1), (), at_s, at_s))
            found[match.group(1)] = WriterSeen(
                before.snapshot_id,
                (*before.records, info.name),
                min(before.since_s, at_s),
                max(before.seen_s, at_s),
            )
    return found


def is_tombstone(body: bytes) -> bool:
    """Whether this unsealed object under ``snapshots/`` is a tombstone."""
    return body == _TOMBSTONE


def end_dead(store: Store, writer: WriterSeen) -> None:
    """Keep a writer from ever committing, or find out that it has; then remove its records. Raises OSError."""
    with contextlib.suppress(Exists):  # it has committed, or there is a tombstone already
        put_tombstone(store, snapshot_object(writer.snapshot_id))
    for name in writer.records:
        store.backend.delete(name)


def put_tombstone(store: Store, name: str) -> None:
    """Keep an object of this name from ever being created. Raises Exists if there is one, OSError."""
    store.backend.create(name, store.seal(name, _TOMBSTONE))


def commit(store: Store, registration: Registration, data: bytes) -> None:
    """Create the snapshot, and end the registration. Everything that it refers to is durable.

    Raises StoreError. If it is unknown whether the snapshot exists now, the error says so.
    """
    name = registration.snapshot_name
    sealed = store.seal(name, data)
    try:
        store.backend.create(name, sealed)
    except Exists as e:
        registration.end()
        raise registration.was_ended() from e
    except OSError as e:
        if not _is_committed(store, registration, sealed):
            registration.end()
            raise store.not_usable(e) from e
    registration.end()


def _is_committed(store: Store, registration: Registration, sealed: bytes) -> bool:
    """After a commit that failed or whose response was lost: it may still be in progress, so a tombstone decides."""
    name = registration.snapshot_name
    try:
        try:
            put_tombstone(store, name)
        except Exists:
            return store.backend.read(name, 0, len(sealed) + 1) == sealed
    except OSError as e:
        registration.abandon()
        raise StoreError(
            f"it is not known whether the snapshot {registration.snapshot_id} was completed: at that moment "
            f"{store.not_usable(e).message}",
            path=store.path(name),
            hint="list the store when it works again",
        ) from e
    return False
