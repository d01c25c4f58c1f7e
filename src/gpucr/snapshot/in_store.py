"""A snapshot of a job in a store."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpucr.errors import StoreDamaged
from gpucr.model import DevicePart
from gpucr.records import RecordError
from gpucr.snapshot.manifest import Manifest, decode
from gpucr.store import snapshots, verify, writers
from gpucr.store.opened import HINT_DAMAGED, Store
from gpucr.store.stored_snapshot import StoredSnapshot


@dataclass(frozen=True)
class SnapshotInStore:
    """A committed snapshot in a store. Made by `open` or by a dump."""

    store: Store = field(repr=False)
    stored: StoredSnapshot = field(repr=False)
    manifest: Manifest = field(repr=False)

    def __repr__(self) -> str:
        return f"SnapshotInStore({self.where!r})"

    @classmethod
    def open(cls, store: Store, wanted: str | None) -> SnapshotInStore:
        """The snapshot of this name or id, ``latest``, or None: the only one. Reads and checks the manifest.

        Raises InvalidRequest, StoreDamaged, StoreError.
        """
        return cls.of(store, snapshots.find(store, wanted))

    @classmethod
    def of(cls, store: Store, stored: StoredSnapshot) -> SnapshotInStore:
        """Like `open`, for one already found. Raises StoreDamaged."""
        try:
            manifest = decode(stored.manifest)
            _check_areas(manifest, stored)
        except RecordError as e:
            path = store.path(writers.snapshot_object(stored.id))
            hint = f"{HINT_DAMAGED}; another format version needs the gpucr that wrote it"
            raise StoreDamaged(f"{path} has no valid manifest of a job: {e}", path=path, hint=hint) from e
        return cls(store, stored, manifest)

    @property
    def where(self) -> str:
        """``STORE#ID``: names can be reused."""
        return snapshot_url(self.store, self.stored.id)

    def verify(self) -> None:
        """Read and check every piece. Raises StoreDamaged, naming the first that differs."""
        report = verify.verify(self.store, [self.stored], deep=True)
        for problem in report.problems.get(self.stored.id, ()):
            raise StoreDamaged(problem, path=self.where, hint=HINT_DAMAGED)


def snapshot_url(store: Store, name: str | None) -> str:
    """This snapshot's name in the store; None: the store itself."""
    return store.backend.url if name is None else f"{store.backend.url}#{name}"


def device_area(part: DevicePart) -> str:
    """The area with this part of device memory; the pid is the manifest's."""
    return f"device/{part}"


def _check_areas(manifest: Manifest, stored: StoredSnapshot) -> None:
    expected = {file.path: file.size_bytes for file in manifest.files}
    for part, data in manifest.device_parts.items():
        if data.store_bytes is None:
            raise RecordError(f"the device memory of process {part.pid} is not in the store")
        expected[device_area(part)] = data.size_bytes
    found = {area.name: area.size_bytes for area in stored.areas}
    if found != expected:
        differing = sorted(name for name, _ in found.items() ^ expected.items())
        raise RecordError(f"it does not fit what was stored: {', '.join(differing[:3])}")
