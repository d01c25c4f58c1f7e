"""The snapshots of one job in a store, all named after the job's id. Of several nodes: sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpucr import PruneRules, SnapshotInStore, open_snapshot, secret_of_store
from gpucr.batch.one_job import OneJob, is_same
from gpucr.errors import InvalidRequest, StoreError
from gpucr.operations.places import in_store, is_store
from gpucr.operations.stores import init_store, list_snapshots, prune_store, remove_snapshot

if TYPE_CHECKING:
    from gpucr import Secret, StoredSnapshot

_LOOK_EVERY_S = 0.2
_RULES_OF_TRAVEL = PruneRules(grace_s=0, dead_after_s=0, repack_below=0.5)


class JobSnapshots:
    """The snapshots of ``job_id`` in ``store``, a URL or a folder, which is created if missing and ``may_make``.

    ``one_job``: sets of several nodes; this is one of them. ``travels``: nobody else uses this store, and the batch
    system copies it between allocations: removed data is pruned at once. ``known``: of a set, the part of node 0.
    """

    def __init__(
        self,
        store: str,
        job_id: str,
        key: Secret | None,
        *,
        one_job: OneJob | None = None,
        may_make: bool = True,
        travels: bool = False,
    ) -> None:
        self.key = key
        self._one_job = one_job
        self._may_make = may_make
        self._travels = travels
        self.known: tuple[StoredSnapshot, ...] = ()
        self._store = store
        self._id = job_id
        self.place = f"{store}#{job_id}"
        of_node = "" if one_job is None else f".{one_job.node}"
        self.job_name = f"batch-{job_id.lower()}"[: 63 - len(of_node)].rstrip("._-") + of_node

    def latest(self) -> str | None:
        """The id of the latest, or of its set; None: there is none.

        Raises InvalidRequest for one of another number of nodes and for a folder that is no store, StoreError if the
        store is missing although the job was started before, and as `gpucr.list_snapshots`.
        """
        self.make_store()
        self._look()
        return _id_of(self.known[-1]) if self.known else None

    def open(self, wanted: str, command: Sequence[str]) -> SnapshotInStore:
        """The snapshot of this id, or this node's part of the set. It must have this command line.

        Raises InvalidRequest for that of another one, StoreError if this node sees no such set, and as
        `gpucr.open_snapshot`.
        """
        part = wanted
        if self._one_job is not None:
            made = list_snapshots(self._store, key=self.key).sets.get(wanted)
            if made is None:
                raise self._missing(f"has no set {wanted} here, which node 0 has found")
            part = made.snapshot_ids[self._one_job.node]
        snapshot = in_store(open_snapshot(f"{self._store}#{part}", self.key))
        launch = snapshot.manifest.launch
        was = launch.command if launch is not None else None
        names = self._one_job.names() if self._one_job is not None else ()
        if was is None or not is_same(command, was, names):
            said = " ".join(was) if was else "a job that gpucr did not start"
            raise InvalidRequest(
                f"the snapshot {snapshot.where} is of another job: {said}",
                hint=f"give another --id, or remove it with `gpucr rm '{self.place}'`",
                code="GPUCR-BATCH-OTHER-JOB",
            )
        return snapshot

    def where(self, wanted: str) -> str:
        """The place of a set."""
        return f"{self._store}#{wanted}"

    def secret(self, wait_s: float, check: Callable[[], None]) -> bytes:
        """The secret of the nodes of one job. Node 0 makes it, and the store; the others wait, calling ``check``.

        Raises StoreError, and as `make_store`.
        """
        leads = self._one_job is None or self._one_job.node == 0
        if leads:
            self.make_store()
        end_s = time.monotonic() + wait_s
        while True:
            if "://" in self._store or is_store(self._store):
                if (found := secret_of_store(self._store, make=leads, key=self.key)) is not None:
                    return found
            elif not self._may_make:
                raise self._missing("is missing, and this is not the first start of the job")
            if time.monotonic() > end_s:
                raise self._missing(f"was not made by node 0 within {wait_s:.0f} s, or this node does not see it")
            check()
            time.sleep(_LOOK_EVERY_S)

    def make_store(self) -> None:
        """Make a store in the folder if there is none; all tasks of an array may try at once."""
        if "://" in self._store or is_store(self._store):
            return
        if not self._may_make:
            raise self._missing("is missing, and this is not the first start of the job")
        try:
            init_store(self._store, key=self.key)
        except StoreError as e:
            if not is_store(self._store):
                raise InvalidRequest(
                    f"{self._store} is not a store: {e.message}", hint=f"give --to a store, or a new folder; {e.hint}"
                ) from e

    def keep_the_last(self, made: StoredSnapshot | None) -> None:
        """Remove all but the latest; ``made`` has just come, and is known even if the store cannot be listed."""
        self.known = self.known if made is None else (*self.known, made)
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
        whole = [each for each in listing.snapshots if each.name == self._id and listing.is_whole(each)]
        count = self._one_job.node_count if self._one_job is not None else None
        for each in whole[-1:]:
            found = each.part.node_count if each.part is not None else None
            if found != count:
                raise InvalidRequest(
                    f"the last snapshot of {self.place} is {_of_nodes(found)}, and this is {_of_nodes(count)}",
                    hint=f"start it as it was, or give another --id, or remove it with `gpucr rm '{self.place}'`",
                    code="GPUCR-BATCH-OTHER-JOB",
                )
        self.known = tuple(each for each in whole if each.part is None or each.part.node == 0)

    def _missing(self, what: str) -> StoreError:
        return StoreError(
            f"the store {self._store} {what}",
            path=self._store,
            hint="is its file system mounted on this node? The job was not started from scratch; if it may be, "
            "make the store with `gpucr store init`",
            code="GPUCR-BATCH-NO-STORE",
        )

    def _remove(self, chosen: Sequence[StoredSnapshot]) -> None:
        for each in chosen:
            remove_snapshot(f"{self._store}#{_id_of(each)}", key=self.key)
        if self._travels and chosen:
            for _ in ("retired", "deleted"):  # what one prune retires the next one deletes
                prune_store(self._store, _RULES_OF_TRAVEL, key=self.key)


def _id_of(each: StoredSnapshot) -> str:
    return each.id if each.part is None else each.part.set_id


def _of_nodes(count: int | None) -> str:
    return "of a job on one node" if count is None else f"of a job on {count} nodes"


def require_store(place: str) -> str:
    """The location of a store. Raises InvalidRequest for a snapshot in one."""
    if "#" in place:
        raise InvalidRequest(
            f"{place} names a snapshot, and a store is meant: a job has its snapshots by its id",
            hint="leave out what follows the #",
        )
    return place
