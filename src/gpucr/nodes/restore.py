"""Restore a job whose parts are on several nodes: none runs before all are restored."""

from __future__ import annotations

import time
from dataclasses import replace

from gpucr.diagnosis.preflight.surroundings import FilesMode
from gpucr.errors import Interrupted, InvalidRequest, StoreError
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.model import GpuMap
from gpucr.network.between import Between
from gpucr.nodes.parts import TIMEOUT_S, PartReport, meeting_for, required_limit
from gpucr.nodes.places import AddressMap, agree
from gpucr.nodes.rendezvous import Rendezvous
from gpucr.operations.requests import RestoreRequest
from gpucr.operations.restore import RestoreReport, run_restore
from gpucr.snapshot.in_store import SnapshotInStore, snapshot_url
from gpucr.snapshot.location import Place, open_store_for_jobs, place_of_store
from gpucr.store import snapshots
from gpucr.store.keys import Secret
from gpucr.store.opened import Store
from gpucr.store.stored_snapshot import SetPart, StoredSnapshot
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.events import OnProgress
from gpucr.undo.interrupts import not_over_yet
from gpucr.undo.operation import Terms, all_or_nothing


def restore_part(
    place: Place,
    rendezvous: Rendezvous,
    *,
    gpu_map: GpuMap | str | None = None,
    gpu: str | None = None,
    files: FilesMode = "keep",
    isolate: bool = False,
    name: str | None = None,
    addresses: AddressMap | None = None,
    key: Secret | None = None,
    timeout_s: float = TIMEOUT_S,
    force: bool = False,
    on_progress: OnProgress | None = None,
    ends_with_caller: bool = False,
    cancel: Cancellation | None = None,
) -> PartReport[RestoreReport]:
    """Restore this node's part of the set ``STORE#NAME`` (the latest of this name), together with the other nodes.

    Node 0 says which set it is. No part runs before all are there: where one node fails until then, what all have
    restored is ended, and the set stays. Connections between the parts are kept, also if ``addresses`` of nodes have
    changed: new ones by old ones, or ``auto``, if each part had one. The other arguments are those of `gpucr.restore`
    and `dump_part`.

    Raises NodeFailed (another node did, or cannot be reached), DeadlineExceeded, Interrupted, and as `gpucr.restore`
    (nothing of the job is left); JobDamaged.
    """
    request = RestoreRequest(
        place, GpuRequest.of(gpu_map, gpu), files, isolate=isolate, name=name, ends_with_caller=ends_with_caller
    )
    terms = Terms(timeout_s, force, on_progress, cancel)
    return run_restore_part(place, request, rendezvous, terms, addresses=addresses or {}, key=key)


def run_restore_part(
    place: Place,
    request: RestoreRequest,
    rendezvous: Rendezvous,
    terms: Terms,
    *,
    addresses: AddressMap,
    key: Secret | None = None,
) -> PartReport[RestoreReport]:
    """See `restore_part`. Whichever snapshot is this node's part takes that of the request."""
    location = place_of_store(place)
    if location.snapshot is None:
        raise InvalidRequest(f"{place} names no set", hint=f"name one: {place}#NAME (gpucr ls {place})")
    wanted, cancel = location.snapshot, terms.cancel
    store = open_store_for_jobs(place, key)
    timeout_s = required_limit(terms)
    with all_or_nothing("restore-part", place, cancel, state="nothing of the job is left here"):
        with meeting_for(rendezvous, "restore", store, wanted, cancel) as meeting:
            try:
                _set_id(store, wanted, rendezvous.node_count)  # the other nodes need not be there to see that it is
                set_id = meeting.arrive(lambda: _set_id(store, wanted, rendezvous.node_count))
                begin = time.monotonic()
                deadline = begin + timeout_s
                parts = _parts_of(store, set_id, rendezvous.node)
                not_over_yet()
                snapshot, *others = (SnapshotInStore.of(store, each) for each in parts)
                moved = agree(meeting, snapshot.manifest, addresses, deadline, force=terms.force)
                not_over_yet()
                connections = tuple(each.connection for each in snapshot.manifest.peers)
                of_this_node = replace(
                    request,
                    snapshot=snapshot,
                    other_parts=others,
                    between=Between(connections, moved),
                    before_it_runs=lambda: meeting.together("ready", deadline),
                )
                here = replace(terms, cancel=meeting.cancellation)
                report = run_restore(of_this_node, here.within(deadline))
            except Interrupted:
                if meeting.error is not None:  # the reason for which it was cancelled here
                    raise meeting.error from None
                raise
        part = SetPart(set_id, rendezvous.node, rendezvous.node_count)
        return PartReport(part, snapshot.stored.name or "", report, time.monotonic() - begin)


def _set_id(store: Store, wanted: str, node_count: int) -> str:
    """The named set. Raises InvalidRequest if it is not a set or has another size, StoreError."""
    parts = snapshots.find_parts(store, wanted)
    part = parts[0].part
    where = snapshot_url(store, wanted)
    if part is None:
        raise InvalidRequest(
            f"{where} is no set of several nodes, but one snapshot", hint=f"restore it alone: gpucr restore {where}"
        )
    if part.node_count != node_count:
        raise InvalidRequest(
            f"the set {where} is of {part.node_count} nodes, and {node_count} are to restore it",
            hint=f"run it on {part.node_count} nodes",
        )
    return part.set_id


def _parts_of(store: Store, set_id: str, node: int) -> tuple[StoredSnapshot, ...]:
    """This node's part of the set first, then the others."""
    listing = snapshots.list_all(store)
    made = listing.sets.get(set_id)
    parts = listing.parts(made) if made is not None else ()
    if made is None or len(parts) < len(made.snapshot_ids):
        raise StoreError(
            f"the store {store.backend.url} does not have all parts of the set {set_id}",
            path=store.backend.url,
            hint="do all nodes see the same store? gpucr ls shows what is in it",
        )
    return (parts[node], *parts[:node], *parts[node + 1 :])
