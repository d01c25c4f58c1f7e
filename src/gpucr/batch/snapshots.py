"""The snapshots of one job in a store, all named after the job's id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpucr import PruneRules, SnapshotInStore, open_snapshot
from gpucr.errors import InvalidRequest, StoreError
from gpucr.operations.places import in_store, is_store
from gpucr.operations.stores import init_store, list_snapshots, prune_store, remove_snapshot

if TYPE_CHECKING:
    from gpucr import Secret, StoredSnapshot

_RULES_OF_TRAVEL = PruneRules(grace_s=0, dead_after_s=0, repack_below=0.5)


class JobSnapshots:
    """The snapshots of ``job_id`` in ``store``, a URL or a folder, which is created if missing and ``may_make``.

    ``travels``: nobody else uses this store, and the batch system copies it between allocations: removed data is pruned
    at once.
    """

    def __init__(
        self, store: str, job_id: str, key: Secret | None, *, may_make: bool = True, travels: bool = False
    ) -> None:
        self.key = key
        self._may_make = may_make
        self._travels = travels
        self.known: tuple[StoredSnapshot, ...] = ()
        self._store = store
        self._id = job_id
        self.place = f"{store}#{job_id}"
        self.job_name = f"batch-{job_id.lower()}"[:63].rstrip("._-")

    def latest(self, command: Sequence[str]) -> SnapshotInStore | None:
        """The latest, which must have this command line; None: there is none.

        Raises InvalidRequest for that of another one and for a folder that is no store, StoreError if the store is
        missing although the job was started before, and as `gpucr.list_snapshots` and `gpucr.open_snapshot` do.
        """
        self.make_store()
        self._look()
        if not self.known:
            return None
        snapshot = in_store(open_snapshot(f"{self._store}#{self.known[-1].id}", self.key))
        launch = snapshot.manifest.launch
        was = launch.command if launch is not None else None
        if was != tuple(command):
            said = " ".join(was) if was else "a job that gpucr did not start"
            raise InvalidRequest(
                f"the snapshot {snapshot.where} is of another job: {said}",
                hint=f"give another --id, or remove it with `gpucr rm '{self.place}'`",
                code="GPUCR-BATCH-OTHER-JOB",
            )
        return snapshot

    def make_store(self) -> None:
        """Make a store in the folder if there is none; all tasks of an array may try at once."""
        if "://" in self._store or is_store(self._store):
            return
        if not self._may_make:
            raise StoreError(
                f"the store {self._store} is missing, and this is not the first start of the job",
                path=self._store,
                hint="is its file system mounted on this node? The job was not started from scratch; if it may be, "
                "make the store with `gpucr store init`",
                code="GPUCR-BATCH-NO-STORE",
            )
        try:
            init_store(self._store, key=self.key)
        except StoreError as e:
            if not is_store(self._store):
                raise InvalidRequest(
                    f"{self._store} is not a store: {e.message}", hint=f"give --to a store, or a new folder; {e.hint}"
                ) from e

    def keep_the_last(self, made: StoredSnapshot) -> None:
        """Remove all but the latest; ``made`` has just come, and is known even if the store cannot be listed."""
        self.known = (*self.known, made)
        self._look()
        self._remove(self.known[:-1])

    def remove_all(self) -> None:
        """Remove all, if there are any: the id is done with."""
        if self.known:
            self._look()
            self._remove(self.known)

    def next_start(self) -> str:
        """The snapshot for the next start."""
        if not self.known:
            return "there is no snapshot, and the next start is from scratch"
        return f"the next start continues from the snapshot of {self.known[-1].created}"

    def _look(self) -> None:
        listing = list_snapshots(self._store, key=self.key)
        self.known = tuple(each for each in listing.snapshots if each.name == self._id)

    def _remove(self, chosen: Sequence[StoredSnapshot]) -> None:
        for each in chosen:
            remove_snapshot(f"{self._store}#{each.id}", key=self.key)
        if self._travels and chosen:
            for _ in ("retired", "deleted"):  # what one prune retires the next one deletes
                prune_store(self._store, _RULES_OF_TRAVEL, key=self.key)


def require_store(place: str) -> str:
    """The location of a store. Raises InvalidRequest for a snapshot in one."""
    if "#" in place:
        raise InvalidRequest(
            f"{place} names a snapshot, and a store is meant: a job has its snapshots by its id",
            hint="leave out what follows the #",
        )
    return place
