"""The secret in a store, by which nodes know each other that all reach this store."""

from __future__ import annotations

from gpucr.snapshot.location import Place, open_store_for_jobs
from gpucr.store import sets
from gpucr.store.keys import Secret


def secret_of_store(store: Place, *, make: bool = False, key: Secret | None = None) -> bytes | None:
    """The secret by which nodes of a job know each other, for a `Rendezvous`. None: the store has none yet.

    ``make``: make it if there is none. It is random and stays the same. Whoever can read the store knows it, and can
    read the memory of the jobs in it anyway. Raises InvalidRequest, StoreError, StoreDamaged, WrongKey.
    """
    opened = open_store_for_jobs(store, key)
    return sets.make_secret(opened) if make else sets.find_secret(opened)
