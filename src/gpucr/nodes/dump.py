"""Dump a job whose parts are on several nodes: frozen everywhere, saved everywhere, then ended or thawed everywhere.

One object in the store, created once, decides the outcome (store/sets.py). Node 0 creates it when all nodes have saved.
A node that has saved and loses contact with node 0 tries to create a tombstone instead: either it succeeds, and the set
is abandoned, or it learns that the set is complete. So every node that reaches the store comes to the same outcome,
whichever node dies.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from msgspec import structs

from gpucr.diagnosis import preflight
from gpucr.errors import GpucrError, Interrupted, InvalidRequest, NodeFailed, StoreError
from gpucr.gpu_state.ways import GpuState
from gpucr.jobs import selection
from gpucr.jobs.selector import JobSelector
from gpucr.network.lock import JobNetwork
from gpucr.nodes.guest import Guest
from gpucr.nodes.holding import HeldTogether
from gpucr.nodes.host import Host
from gpucr.nodes.parts import TIMEOUT_S, PartReport, meeting_for, required_limit
from gpucr.nodes.peers import find_peers
from gpucr.nodes.rendezvous import Rendezvous
from gpucr.operations.dump import DumpReport, run_dump_of_part, target_of
from gpucr.operations.freeze import block_connections, forget_saved, keep_blocked, run_freeze, save_frozen
from gpucr.operations.other_parts import OtherParts
from gpucr.operations.requests import DumpRequest, FreezeRequest
from gpucr.snapshot.in_store import SnapshotInStore
from gpucr.snapshot.location import Compress, InStore, Place, in_store
from gpucr.store import sets, snapshots
from gpucr.store.keys import Secret
from gpucr.store.sets import StoredSet
from gpucr.store.stored_snapshot import SetPart
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.events import OnProgress
from gpucr.undo.interrupts import Interrupts, not_over_yet
from gpucr.undo.operation import Terms, all_or_nothing

Answer = TypeVar("Answer")

_FREEZE_S = 60.0
"""Parts that are already frozen wait for one that cannot be."""
_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)
_INSIST_S = 10.0
"""How long a store is retried. An object store has been retried for minutes when it fails, while the job waits."""


def dump_part(
    pid: int | str | JobSelector,
    to: Place,
    rendezvous: Rendezvous,
    *,
    leave_running: bool = False,
    gpu_state: GpuState = "auto",
    compress: Compress = "auto",
    encrypt: bool = False,
    trust_store: bool = False,
    key: Secret | None = None,
    timeout_s: float = TIMEOUT_S,
    force: bool = False,
    on_progress: OnProgress | None = None,
    cancel: Cancellation | None = None,
) -> PartReport[DumpReport]:
    """Dump this node's part of a job into the set ``STORE#NAME``, together with the other nodes, and end it.

    Every node calls this with the same store and name, and its own part. All parts are frozen before the first is
    saved. The set is complete only when all are saved; only then do the parts end, or continue with ``leave_running``.
    If one node fails before that, all parts continue as before, and nothing stays in the store.

    ``timeout_s``: the time limit once all nodes have arrived; a freeze takes at most a minute of it. The other
    arguments are those of `gpucr.dump`. Needs what `gpucr.dump` needs.

    Raises NodeFailed (another node failed or cannot be reached), DeadlineExceeded, Interrupted and as `gpucr.freeze`
    and `gpucr.dump` (the job is as it was found); StoreError if it is unknown whether the set is complete (the job
    runs); JobDamaged.
    """
    request = DumpRequest(
        pid, to, leave_running, "sync", "close", False, gpu_state, compress, encrypt, trust_store, key=key
    )
    return run_dump_part(request, rendezvous, Terms(timeout_s, force, on_progress, cancel))


def run_dump_part(request: DumpRequest, rendezvous: Rendezvous, terms: Terms) -> PartReport[DumpReport]:
    """See `dump_part`."""
    place, leave_running, cancel = target_of(request), request.leave_running, terms.cancel
    if not isinstance(place, InStore) or place.name is None:
        raise InvalidRequest(
            f"{request.to} does not name a set", hint="name a store that all nodes reach, and a name in it: STORE#NAME"
        )
    snapshots.check_name(place.name)
    timeout_s = required_limit(terms)
    action = "dump and keep running" if leave_running else "dump and end"
    with all_or_nothing("dump-part", request.job, cancel, state="the job is as it was found") as interrupts:
        with meeting_for(rendezvous, action, place.store, place.name, cancel) as meeting:
            try:
                _require_dumpable(request, force=terms.force)  # the other nodes need not be there for that
                part = SetPart(meeting.arrive(sets.new_id), rendezvous.node, rendezvous.node_count)
                begin = time.monotonic()
                dump = _Dump(meeting, structs.replace(place, part=part), part, interrupts)
                report = dump.run(request, begin + timeout_s, replace(terms, cancel=meeting.cancellation))
            except Interrupted:
                if meeting.error is not None:  # the reason why it was cancelled
                    raise meeting.error from None
                raise
        return PartReport(part, place.name, report, time.monotonic() - begin)


def _require_dumpable(request: DumpRequest, *, force: bool) -> None:
    """Raises InvalidRequest if there is no such job here, Unsupported for what its dump on several nodes would lose."""
    found = selection.find_job(request.job, force=force)
    for_criu = selection.findings_for_criu(found)
    preflight.require_no_blocking([*preflight.check_between_nodes(found.job), *for_criu], force=force)


class _Dump:
    def __init__(self, meeting: Host | Guest, place: InStore, part: SetPart, interrupts: Interrupts) -> None:
        self._meeting = meeting
        self._place = place
        self._part = part
        self._interrupts = interrupts
        self._saved: SnapshotInStore | None = None
        self._may_count = False
        """Whether the saved snapshot may be part of a complete set."""

    def run(self, request: DumpRequest, deadline: float, terms: Terms) -> DumpReport:
        meeting = self._meeting
        _require_dumpable(request, force=terms.force)  # before the freeze: the save would refuse it with all stopped
        not_over_yet()
        if request.leave_running:
            return self._run_left_running(request, deadline, terms)
        freeze_by = min(deadline, time.monotonic() + _FREEZE_S)
        together = HeldTogether(meeting, freeze_by, _FREEZE_S)
        frozen = run_freeze(FreezeRequest(request.job, request.gpu_state, together), terms.within(freeze_by))
        try:
            with frozen:
                if frozen.lock is None:
                    together.hold_nothing()
                leading_out, being_emptied = block_connections(frozen)
                not_over_yet()
                keep_blocked(frozen, find_peers(meeting, leading_out, being_emptied, deadline))
                report = save_frozen(frozen, request, self._place, terms.within(deadline))
                self._saved = in_store(report.snapshot)
                not_over_yet()
                self._settle(self._saved.stored.id, deadline)
                frozen.end()
        except BaseException:
            if self._saved is not None and not self._may_count:
                forget_saved(frozen)
                with contextlib.suppress(GpucrError):  # otherwise a prune removes it, since its set was abandoned
                    snapshots.remove(self._place.store, self._saved.stored.id)
            raise
        return report

    def _run_left_running(self, request: DumpRequest, deadline: float, terms: Terms) -> DumpReport:
        """The job runs again when CRIU has saved all parts; the set is complete when all of it is in the store."""
        meeting, store = self._meeting, self._place.store
        together = HeldTogether(meeting, deadline, _FREEZE_S)

        def frozen(network: JobNetwork) -> None:
            network.block()
            network.keep_blocked(find_peers(meeting, network.leading_out(), network.being_emptied(), deadline))

        parts = OtherParts(together, together.hold_nothing, frozen, imaged=lambda: meeting.together("imaged", deadline))
        in_background = replace(request, persist="background")
        report, note = run_dump_of_part(in_background, self._place, parts, terms.within(deadline))
        snapshot = in_store(report.snapshot)
        try:
            not_over_yet()
            self._settle(snapshot.stored.id, deadline)
        except BaseException:
            if not self._may_count:
                if note is not None:
                    note.withdraw()
                with contextlib.suppress(GpucrError):  # otherwise a prune removes it, since its set was abandoned
                    snapshots.remove(store, snapshot.stored.id)
            raise
        return report

    def _settle(self, snapshot_id: str, deadline: float) -> None:
        """Return when the set is complete.

        Raises if it was abandoned, and StoreError if that is unknown.
        """
        meeting, store, part = self._meeting, self._place.store, self._part
        if isinstance(meeting, Host):
            ids = meeting.gather("saved", snapshot_id, deadline)
            self._interrupts.postpone()
            self._may_count = True
            made = StoredSet(part.set_id, self._place.name or "", ids)
            if not _persistently(lambda: sets.complete(store, made)):
                self._may_count = False
                raise NodeFailed("another node has given the set up", hint="see what the others say, and try again")
            meeting.announce("complete")
        else:
            self._may_count = True  # node 0 may complete the set as soon as it knows this
            try:
                meeting.say("saved", snapshot_id)
                meeting.wait("complete", deadline)
                self._interrupts.postpone()
            except BaseException:
                self._interrupts.postpone()
                if _persistently(lambda: sets.abandon(store, part.set_id)) is None:
                    self._may_count = False
                    raise
        self._interrupts.commit()
        meeting.conclude()


def _persistently(ask: Callable[[], Answer]) -> Answer:
    """Ask the store, retrying on failure: the answer decides what happens to the job. Raises StoreError."""
    end_s = time.monotonic() + _INSIST_S
    for pause_s in _PAUSES_S:
        try:
            return ask()
        except StoreError:
            if time.monotonic() > end_s:
                raise
            time.sleep(pause_s)
    return ask()
