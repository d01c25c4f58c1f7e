"""All that `location` needs of a store, which a snapshot in a folder starts without."""

from __future__ import annotations

from gpucr.snapshot.in_store import SnapshotInStore
from gpucr.snapshot.store_destination import StoreTarget
from gpucr.snapshot.store_origin import StoreSource
from gpucr.store.location import backend_at, parse
from gpucr.store.opened import Store
from gpucr.store.sets import require_complete
from gpucr.store.sharing import require_may_keep_jobs

__all__ = [
    "SnapshotInStore",
    "Store",
    "StoreSource",
    "StoreTarget",
    "backend_at",
    "parse",
    "require_complete",
    "require_may_keep_jobs",
]
