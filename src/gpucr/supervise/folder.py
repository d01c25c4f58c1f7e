"""What is kept of a supervised job, in ``supervise/NAME`` of the state folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from gpucr.jobs.sidecar import SidecarFolder, SidecarState
from gpucr.records import Count, Duration, Moment, Record, Text
from gpucr.supervise.settings import Supervision

Phase = Literal["supervised", "draining", "finished", "gave-up", "stopped", "left", "taken-away"]
"""``supervised``: a supervisor has it, or should have. ``draining``: a last dump ends it, or has ended it; it will
come back. ``finished``: it ended with exit code 0. ``stopped``: `gpucr stop` ended it. ``left``: it was left to itself.
``taken-away``: somebody else has dumped and ended it, or restored it elsewhere."""

UNFINISHED: frozenset[Phase] = frozenset({"supervised", "draining"})
"""The states that `gpucr supervise --all` resumes."""

MOST_SNAPSHOTS = 1000


class Taken(Record, frozen=True):
    """A snapshot of the job. ``failures``: when the job failed after a restore from it, in seconds since 1970.

    ``worked_s``: how long the job had worked since its start.
    """

    id: Text
    created_s: Moment
    worked_s: Duration
    failures: tuple[Moment, ...] = ()


class SupervisedState(SidecarState, frozen=True):
    """The state of a supervision.

    Times are seconds since 1970, or durations in seconds; counters start with the supervision. ``snapshots``, oldest
    first, are those that were taken and are whole. ``restored_from``: the snapshot that the job was last restored from.
    ``restarts_in_a_row``: without progress. ``failed_checkpoints_in_a_row``: without a new checkpoint. ``downtime_s``
    and ``checkpoint_s``: how long the job stands still for a checkpoint, and how long the whole takes. ``rehearsed``:
    whether a snapshot came back in its rehearsal, by id, as long as it is in the store. ``worked_s``:
    how long it had worked since its start, at ``worked_at_s``; ``failed_at_s``: the most that it had when it failed.
    """

    phase: Phase = "supervised"
    snapshots: tuple[Taken, ...] = ()
    restored_from: Text | None = None
    restarts_in_a_row: Count = 0
    failed_checkpoints_in_a_row: Count = 0
    checkpoints: Mapping[Text, Count] = {}
    restores: Mapping[Text, Count] = {}
    restarts: Mapping[Text, Count] = {}
    rehearsals: Mapping[Text, Count] = {}
    rehearsed: Mapping[Text, bool] = {}
    last_checkpoint_s: Moment | None = None
    next_checkpoint_s: Moment | None = None
    interval_s: Duration | None = None
    downtime_s: Duration | None = None
    checkpoint_s: Duration | None = None
    snapshot_bytes: Mapping[Text, Count] = {}
    bad_gpus: tuple[Text, ...] = ()
    started_over: Count = 0
    worked_s: Duration = 0.0
    worked_at_s: Moment | None = None
    failed_at_s: Duration = 0.0


class SupervisedFolder(SidecarFolder[Supervision, SupervisedState]):
    """The folder of one job."""

    WORD = "supervisor"
    MODULE = "gpucr.supervise.background"
    SERVED = "supervised"
    BEGIN = "gpucr supervise {name} --every 10m --to STORE"
    LEAVE = "gpucr supervise {name} --leave"
    NONE_CODE = "GPUCR-NOT-SUPERVISED"
    DAMAGED_CODE = "GPUCR-SUPERVISION-DAMAGED"
    TAKEN_CODE = "GPUCR-SUPERVISED"
    _FOLDER = "supervise"
    _settings, _state = Supervision, SupervisedState

    def write_settings(self, settings: Supervision) -> None:
        """Store these settings, and begin with a new state. Raises Unsupported."""
        super().write_settings(settings)
        self.forget_state()

    def change_phase(self, phase: Phase) -> None:
        """For the holder of the lock if there is no supervisor. Raises InvalidRequest, Unsupported."""
        self.change_state(phase=phase, next_checkpoint_s=None)
