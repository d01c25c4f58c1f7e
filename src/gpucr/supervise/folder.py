"""A supervised job's files: its settings, state and events, and a lock that its supervisor holds.

A private folder per job, ``supervise/NAME`` in the state folder, with ``settings.json``, ``state.json`` (both written
atomically), ``events.jsonl`` (append-only), ``supervisor.log`` and ``lock`` (flock(2), which ends with its holder).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from gpucr import records
from gpucr.errors import InvalidRequest, Unsupported, reason_of
from gpucr.jobs.names import is_name
from gpucr.jobs.record import MAX_RECORD_BYTES
from gpucr.linux import durable, locks, processes, trusted_paths
from gpucr.linux.private_folders import state_folder
from gpucr.model import ProcessId
from gpucr.records import Count, Duration, Moment, Record, RecordError, Text
from gpucr.supervise.settings import Supervision

Phase = Literal["supervised", "draining", "finished", "gave-up", "stopped", "left", "taken-away"]
"""``supervised``: a supervisor has it, or should have. ``draining``: a last dump ends it, or has ended it; it will
come back. ``finished``: it ended with exit code 0. ``stopped``: `gpucr stop` ended it. ``left``: it was left to itself.
``taken-away``: somebody else has dumped and ended it, or restored it elsewhere."""

UNFINISHED: frozenset[Phase] = frozenset({"supervised", "draining"})
"""The states that `gpucr supervise --all` resumes."""

MOST_SNAPSHOTS = 1000
_SETTINGS, _STATE, _EVENTS, _LOCK, _LOG = "settings.json", "state.json", "events.jsonl", "lock", "supervisor.log"
_ENDED_S = 2.0
"""How long an ended supervisor's child may hold its lock."""


class Taken(Record, frozen=True):
    """A snapshot of the job. ``failures``: when the job failed after a restore from it, in seconds since 1970.

    ``worked_s``: how long the job had worked since its start.
    """

    id: Text
    created_s: Moment
    worked_s: Duration
    failures: tuple[Moment, ...] = ()


class SupervisedState(Record, frozen=True):
    """The state of a supervision.

    Times are seconds since 1970, or durations in seconds; counters start with the supervision. ``snapshots``, oldest
    first, are those that were taken and are whole. ``restored_from``: the snapshot that the job was last restored from.
    ``restarts_in_a_row``: without progress. ``failed_checkpoints_in_a_row``: without a new checkpoint. ``downtime_s``
    and ``checkpoint_s``: how long the job stands still for a checkpoint, and how long the whole takes. ``rehearsed``:
    whether a snapshot came back in its rehearsal, by id, as long as it is in the store. ``worked_s``:
    how long it had worked since its start, at ``worked_at_s``; ``failed_at_s``: the most that it had when it failed.
    """

    phase: Phase = "supervised"
    supervisor: ProcessId | None = None
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


class SupervisedFolder:
    """The folder of one job. Reading raises InvalidRequest if a file is missing or damaged."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = _root() / name

    @property
    def log_path(self) -> Path:
        """Where the supervisor's own output goes."""
        return self.path / _LOG

    @property
    def events_path(self) -> Path:
        """The event log: one JSON object per line."""
        return self.path / _EVENTS

    def exists(self) -> bool:
        """Whether the job is, or was, supervised."""
        return (self.path / _SETTINGS).exists()

    def settings(self) -> Supervision:
        """How the job is supervised."""
        found = self._read(_SETTINGS, Supervision)
        try:
            found.check()
        except InvalidRequest as e:
            raise self._damaged(_SETTINGS, e) from e
        return found

    def state(self) -> SupervisedState:
        """The state; the initial one if there is no such file."""
        try:
            return self._read(_STATE, SupervisedState)
        except InvalidRequest as e:
            if isinstance(e.__cause__, FileNotFoundError):
                return SupervisedState()
            raise

    def write_settings(self, settings: Supervision) -> None:
        """Store these settings and reset the state. Raises Unsupported."""
        with _writing(self.path):
            trusted_paths.make_private(self.path)
            durable.write(self.path / _SETTINGS, records.encode(settings))
            (self.path / _STATE).unlink(missing_ok=True)

    def write_state(self, state: SupervisedState) -> None:
        """Store the state. Raises OSError."""
        durable.write(self.path / _STATE, records.encode(state))

    def change_phase(self, phase: Phase) -> None:
        """For the holder of the lock if there is no supervisor. Raises InvalidRequest, Unsupported."""
        with _writing(self.path):
            self.write_state(replace(self.state(), phase=phase, supervisor=None, next_checkpoint_s=None))

    def append_event(self, event: Mapping[str, Any]) -> None:
        """Add a line to the event log. Raises OSError."""
        fd = trusted_paths.open_file(self.events_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
        try:
            os.write(fd, json.dumps(event).encode() + b"\n")
        finally:
            os.close(fd)

    def supervisor(self) -> ProcessId | None:
        """The running supervisor; None if there is none."""
        with contextlib.suppress(InvalidRequest):
            found = self.state().supervisor
            if found is not None and processes.is_alive(found):
                return found
        return None

    @contextlib.contextmanager
    def held(self, *, wait_s: float = 0.0) -> Iterator[None]:
        """Be the job's only supervisor for this block. Raises InvalidRequest if it has one, Unsupported.

        ``wait_s``: wait for an ended supervisor's child, which holds the lock until it calls exec. Without a supervisor
        others hold it for a moment only, and are waited for in any case.
        """
        if self.supervisor() is None:
            wait_s = max(wait_s, _ENDED_S)
        with _writing(self.path):
            trusted_paths.make_private(self.path)
            fd = trusted_paths.open_file(self.path / _LOCK, os.O_RDWR | os.O_CREAT)
        try:
            try:
                locks.lock(fd, wait_s=wait_s)
            except BlockingIOError:
                raise InvalidRequest(
                    f"the job {self.name} has a supervisor already",
                    hint=f"`gpucr jobs` shows it; `gpucr supervise {self.name} --leave` ends it, the job keeps running",
                    code="GPUCR-SUPERVISED",
                ) from None
            yield
        finally:
            os.close(fd)

    def leave_to_new_job(self) -> None:
        """Another job has the name now: it is not supervised as the earlier one was. Log and events stay.

        Raises InvalidRequest while there is a supervisor, Unsupported.
        """
        if self.exists():
            with self.held(), _writing(self.path):
                for name in (_SETTINGS, _STATE):
                    (self.path / name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder. Raises InvalidRequest while there is a supervisor."""
        if self.path.exists():
            with self.held(wait_s=_ENDED_S):
                shutil.rmtree(self.path, ignore_errors=True)

    def _read(self, name: str, kind: type[records.T]) -> records.T:
        try:
            fd = trusted_paths.open_file(self.path / name, os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(fd, "rb") as file:
                return records.decode(file.read(MAX_RECORD_BYTES), kind)
        except FileNotFoundError as e:
            raise InvalidRequest(
                f"the job {self.name} is not supervised",
                hint=f"supervise it with: gpucr supervise {self.name} --every 10m --to STORE",
                code="GPUCR-NOT-SUPERVISED",
            ) from e
        except (OSError, RecordError) as e:
            raise self._damaged(name, e) from e

    def _damaged(self, name: str, why: Exception) -> InvalidRequest:
        return InvalidRequest(
            f"what is kept of the supervised job {self.name} cannot be read: {self.path / name}: {reason_of(why)}",
            hint=f"supervise it again: gpucr supervise {self.name} --every 10m --to STORE",
            code="GPUCR-SUPERVISION-DAMAGED",
        )


def supervised() -> tuple[SupervisedFolder, ...]:
    """All jobs that are, or were, supervised, by name."""
    try:
        names = sorted(name for name in os.listdir(_root()) if is_name(name))
    except FileNotFoundError:
        return ()
    return tuple(found for found in map(SupervisedFolder, names) if found.exists())


def as_time(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat("T", "seconds")


def _root() -> Path:
    try:
        return state_folder() / "supervise"
    except OSError as e:
        raise _no_folder(e) from e


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise _no_folder(e) from e


def _no_folder(e: OSError) -> Unsupported:
    return Unsupported(
        f"what is kept of supervised jobs cannot be written: {reason_of(e)}",
        hint="set XDG_STATE_HOME to a private folder that can be written",
        code="GPUCR-REGISTRY",
    )
