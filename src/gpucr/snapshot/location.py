"""What users name: a folder with one snapshot, or a store and a snapshot in it.

Code for dumps is loaded only for a dump, a store's libraries only for a store.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, cast, get_args

from msgspec import Struct

from gpucr.errors import InvalidRequest, StoreError
from gpucr.model import CHECK_KNOWN_S, Job
from gpucr.snapshot.folder import (
    CONTAINER_RECORD_NAME,
    GPU_PART_NAME,
    IMAGES_NAME,
    MANIFEST_NAME,
    OLDER_PART_NAME,
    SCATTERED_MANIFEST_NAME,
    Snapshot,
)
from gpucr.snapshot.gpu_part import GpuPart
from gpucr.snapshot.job_snapshot import JobSnapshot
from gpucr.snapshot.origin import FolderSource, RestoreSource

if TYPE_CHECKING:
    from gpucr.snapshot.destination import DumpTarget
    from gpucr.snapshot.in_store import SnapshotInStore
    from gpucr.store.keys import Secret
    from gpucr.store.location import Location
    from gpucr.store.opened import Store
    from gpucr.store.stored_snapshot import SetPart

Place: TypeAlias = str | os.PathLike[str]
Compress = Literal["auto", "none", "fast", "strong"]
"""How a dump into a store compresses: when it saves time, never, or whenever it saves bytes."""

_STORE_FILE = "gpucr-store.json"
_INVENTORY = "inventory.img"
_IMAGES_IN_ARCHIVE = "checkpoint"
"""The folder with CRIU's images in podman's exports and a kubelet's archives."""


class TargetPlace(Protocol):
    """Where dumps can go."""

    def target(self, job: Job, device_bytes: int) -> DumpTarget:
        """A new snapshot there, of this job. Raises SnapshotExists, InvalidRequest."""


class _Folder(Struct, frozen=True):
    path: Path

    def target(self, job: Job, device_bytes: int) -> DumpTarget:
        from gpucr.snapshot.destination import FolderTarget  # not needed for just reading snapshots

        return FolderTarget(self.path)


class InStore(Struct, frozen=True):
    """A new snapshot with this name in a store; ``part``: its place in a set of several nodes."""

    store: Store
    name: str | None
    compress: Compress
    trust_store: bool
    check_known_s: float = CHECK_KNOWN_S
    part: SetPart | None = None

    def target(self, job: Job, device_bytes: int) -> DumpTarget:
        """A snapshot there. Raises InvalidRequest for an invalid name."""
        target: DumpTarget = _stores().StoreTarget(
            self.store,
            self.name,
            compress=self.compress,
            trust_store=self.trust_store,
            check_known_s=self.check_known_s,
            job=job,
            device_bytes=device_bytes,
            part=self.part,
        )
        return target


def find_target(
    to: Place,
    *,
    compress: Compress,
    encrypt: bool,
    trust_store: bool,
    key: Secret | None,
    check_known_s: float = CHECK_KNOWN_S,
) -> TargetPlace:
    """Where a dump goes. An empty or missing folder is for a plain snapshot.

    Raises InvalidRequest, WrongKey, StoreDamaged, StoreError.
    """
    if compress not in get_args(Compress):
        raise InvalidRequest(f"compress is {compress!r}", hint="give one of " + ", ".join(get_args(Compress)))
    if not 0 <= check_known_s < float("inf"):
        raise InvalidRequest(f"check_known_s is {check_known_s!r}", hint="give seconds; 0: check all that is known")
    location = _store_location(to)
    if location is None:
        if encrypt or key is not None or trust_store or compress != "auto":
            raise InvalidRequest(
                f"{os.fspath(to)} is not a store: only a store compresses and encrypts snapshots",
                hint=f"make one first: gpucr store init {os.fspath(to)}",
            )
        return _Folder(Path(to))
    store = _open_for_jobs(location, key)
    if encrypt and store.keys is None:
        raise StoreError(
            f"the store {store.backend.url} is not encrypted",
            path=store.backend.url,
            hint="make another one with: gpucr store init --encrypt",
            code="GPUCR-NOT-ENCRYPTED",
        )
    return InStore(store, location.snapshot, compress, trust_store, check_known_s)


def open_snapshot(place: Place, key: Secret | None = None) -> Snapshot | SnapshotInStore:
    """The named snapshot: a folder, ``STORE#NAME``, ``STORE#latest``, or the only one of a store.

    For a container's images it is the GPU part; also for a folder made by `gpucr dump --container`, and for an unpacked
    archive from podman or a kubelet.

    Raises InvalidRequest, SnapshotError and its subclasses.
    """
    location = _store_location(place)
    if location is None:
        return Snapshot.open(_folder_of(Path(place)))
    found: SnapshotInStore = _stores().SnapshotInStore.open(_open(location, key), location.snapshot)
    return found


def open_store(place: Place, key: Secret | None = None) -> Store:
    """The named store; a snapshot in it may be named as well. Raises InvalidRequest, StoreError, WrongKey."""
    return _open(place_of_store(place), key)


def place_of_store(place: Place) -> Location:
    """The location of a store, existing or not. Raises InvalidRequest."""
    found: Location = _stores().parse(os.fspath(place))
    return found


def place_of_whole_store(place: Place) -> Location:
    """Like `place_of_store`; raises InvalidRequest for a snapshot in a store, too."""
    location = place_of_store(place)
    if location.snapshot is not None:
        raise InvalidRequest(f"{place} names a snapshot, and a store is meant", hint="leave out what follows the #")
    return location


def is_store(place: Place) -> bool:
    """Whether this names a store or a snapshot in one, not the folder of one snapshot. Raises InvalidRequest."""
    return _store_location(place) is not None


def open_store_for_jobs(place: Place, key: Secret | None = None) -> Store:
    """`open_store` for dumps and restores. Also raises StoreError if root must not put jobs there."""
    return _open_for_jobs(place_of_store(place), key)


def source_of(snapshot: JobSnapshot) -> RestoreSource:
    """The origin for restoring this snapshot.

    Raises StoreDamaged, StoreError if a part of it is missing, root must not restore from there, or its set is
    incomplete.
    """
    if isinstance(snapshot, Snapshot):
        return FolderSource(snapshot)
    stored, stores = in_store(snapshot), _stores()
    stores.require_may_keep_jobs(stored.store.backend)
    stores.require_complete(stored.store, stored.stored)
    source: RestoreSource = stores.StoreSource(stored)
    return source


def in_store(snapshot: JobSnapshot) -> SnapshotInStore:
    """This snapshot, which is in a store. Raises TypeError if it is not."""
    if isinstance(snapshot, Snapshot) or not isinstance(snapshot, _stores().SnapshotInStore):
        raise TypeError(f"{snapshot!r} is in no store")
    return cast("SnapshotInStore", snapshot)


def _folder_of(path: Path) -> Path:
    """The folder that has the manifest. (If the caller may not look, opening the snapshot fails with that.)

    Raises InvalidRequest for a container's folder without one: it may be complete.
    """
    if not os.path.exists(path / MANIFEST_NAME):
        for images in (path, path / IMAGES_NAME, path / _IMAGES_IN_ARCHIVE):
            if os.path.isdir(images / GPU_PART_NAME):
                return images / GPU_PART_NAME
            GpuPart(images).require_finished()
            if os.path.isdir(images / OLDER_PART_NAME):  # left by a killed gpucr: a restore puts it back
                return images / OLDER_PART_NAME
            if os.path.isfile(images / SCATTERED_MANIFEST_NAME):
                return images
        _require_no_container(path)
    return path


def _require_no_container(path: Path) -> None:
    if os.path.isfile(path / CONTAINER_RECORD_NAME):
        what = "a container without GPU state"
    elif any(os.path.isfile(images / _INVENTORY) for images in (path, path / _IMAGES_IN_ARCHIVE)):
        what = "CRIU's images, without GPU state"
    else:
        return
    raise InvalidRequest(
        f"{path} holds {what}: its runtime restores that, and gpucr has nothing to show or check",
        hint="if these are the images of a snapshot, name the folder above",
    )


def _store_location(place: Place) -> Location | None:
    text = os.fspath(place)
    if not text:  # usually an unset shell variable: the current folder is not meant
        raise InvalidRequest("the place of the snapshot is empty", hint="name a folder, or STORE#NAME")
    if "://" not in text and "#" not in text and not os.path.exists(os.path.join(text, _STORE_FILE)):
        return None
    found: Location = _stores().parse(text)
    return found if found.is_store else None


def _open_for_jobs(location: Location, key: Secret | None) -> Store:
    store = _open(location, key)
    _stores().require_may_keep_jobs(store.backend)
    return store


def _open(location: Location, key: Secret | None) -> Store:
    stores = _stores()
    store: Store = stores.Store.open(stores.backend_at(location), key)
    return store


def _stores() -> ModuleType:
    from gpucr.snapshot import stores  # its libraries take as long to load as all the rest

    return stores
