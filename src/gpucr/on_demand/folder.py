"""The files of a job that is served on demand: its settings, state and events, and a lock that its forwarder holds.

A private folder per job, ``on-demand/NAME`` in the state folder, with ``settings.json``, ``state.json`` (both written
atomically), ``events.jsonl`` (append-only), ``forwarder.log`` and ``lock`` (flock(2), which ends with its holder).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gpucr import records
from gpucr.errors import InvalidRequest, Unsupported, reason_of
from gpucr.jobs.names import is_name
from gpucr.jobs.record import MAX_RECORD_BYTES
from gpucr.linux import durable, locks, processes, trusted_paths
from gpucr.linux.private_folders import state_folder
from gpucr.model import ProcessId
from gpucr.on_demand.settings import OnDemand
from gpucr.records import Count, Duration, Moment, Record, RecordError, Text

_SETTINGS, _STATE, _EVENTS, _LOCK, _LOG = "settings.json", "state.json", "events.jsonl", "lock", "forwarder.log"
_ENDED_S = 2.0
"""How long an ended forwarder's child may hold its lock."""

WAKE_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the histogram of wake times; longer ones count in none of them, but in the whole number."""


class OnDemandCounts(Record, frozen=True):
    """What a forwarder has done, since the job is served on demand.

    ``wakes`` and ``sleeps`` by result and by reason. ``wake_buckets``: how many wakes took at most as long as each of
    `WAKE_BUCKETS_S`; ``waits``: requests that had to wait; ``bytes``: from clients, and to clients.
    """

    wakes: Mapping[Text, Count] = {}
    sleeps: Mapping[Text, Count] = {}
    wake_buckets: tuple[Count, ...] = (0,) * len(WAKE_BUCKETS_S)
    wake_s: float = 0.0
    waits: Count = 0
    wait_s: float = 0.0
    refused: Mapping[Text, Count] = {}
    connections: Count = 0
    bytes: Mapping[Text, Count] = {}


class OnDemandState(Record, frozen=True):
    """What outlives a forwarder. ``device_bytes``: what the job needs, by GPU UUID, once it is known.

    ``wake_s`` and ``sleep_s``: how long the last ones took.
    """

    forwarder: ProcessId | None = None
    device_bytes: Mapping[Text, Count] = {}
    wake_s: Duration | None = None
    sleep_s: Duration | None = None
    asleep_since_s: Moment | None = None
    counts: OnDemandCounts = OnDemandCounts()


class OnDemandFolder:
    """The folder of one job. Reading raises InvalidRequest if a file is missing or damaged."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = _root() / name

    @property
    def log_path(self) -> Path:
        """Where the forwarder's own output goes."""
        return self.path / _LOG

    @property
    def events_path(self) -> Path:
        """The event log: one JSON object per line."""
        return self.path / _EVENTS

    def exists(self) -> bool:
        """Whether the job is, or was, served on demand."""
        return (self.path / _SETTINGS).exists()

    def settings(self) -> OnDemand:
        """How the job is served."""
        found = self._read(_SETTINGS, OnDemand)
        try:
            found.check()
        except InvalidRequest as e:
            raise self._damaged(_SETTINGS, e) from e
        return found

    def state(self) -> OnDemandState:
        """The state; the initial one if there is no such file."""
        try:
            return self._read(_STATE, OnDemandState)
        except InvalidRequest as e:
            if isinstance(e.__cause__, FileNotFoundError):
                return OnDemandState()
            raise

    def write_settings(self, settings: OnDemand) -> None:
        """Store these settings; the state stays. Raises Unsupported."""
        with _writing():
            trusted_paths.make_private(self.path)
            durable.write(self.path / _SETTINGS, records.encode(settings))

    def write_state(self, state: OnDemandState) -> None:
        """Store the state. Raises OSError."""
        durable.write(self.path / _STATE, records.encode(state))

    def tell(self, event: str, **fields: Any) -> None:
        """Write an event to the log of events and to stderr. A full disk never stops a forwarder."""
        time = datetime.now(timezone.utc).isoformat("T", "milliseconds")
        told = {"time": time, "event": event, "job": self.name, "pid": os.getpid(), **fields}
        with contextlib.suppress(OSError):
            fd = trusted_paths.open_file(self.events_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
            try:
                os.write(fd, json.dumps(told).encode() + b"\n")
            finally:
                os.close(fd)
        words = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"{time} {event} {words}\n")
            sys.stderr.flush()

    def forwarder(self) -> ProcessId | None:
        """The running forwarder; None if there is none."""
        with contextlib.suppress(InvalidRequest):
            found = self.state().forwarder
            if found is not None and processes.is_alive(found):
                return found
        return None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Be the job's only forwarder for this block. Raises InvalidRequest if it has one, Unsupported."""
        with _writing():
            trusted_paths.make_private(self.path)
            fd = trusted_paths.open_file(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            try:
                locks.lock(fd, wait_s=_ENDED_S if self.forwarder() is None else 0.0)
            except BlockingIOError:
                raise InvalidRequest(
                    f"the job {self.name} has a forwarder already",
                    hint=f"`gpucr on-demand {self.name} --leave` ends it, and leaves the job as it is",
                    code="GPUCR-ON-DEMAND",
                ) from None
            yield
        finally:
            os.close(fd)

    def leave(self) -> None:
        """For the holder of the lock: the forwarder is not missing, it was ended. Raises Unsupported."""
        with _writing():
            self.write_state(replace(self.state(), forwarder=None))

    def remove(self) -> None:
        """Remove the folder. Raises InvalidRequest while there is a forwarder."""
        if self.path.exists():
            with self.held():
                shutil.rmtree(self.path, ignore_errors=True)

    def _read(self, name: str, kind: type[records.T]) -> records.T:
        try:
            fd = trusted_paths.open_file(self.path / name, os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(fd, "rb") as file:
                return records.decode(file.read(MAX_RECORD_BYTES), kind)
        except FileNotFoundError as e:
            raise InvalidRequest(
                f"the job {self.name} is not served on demand",
                hint=f"serve it with: gpucr on-demand {self.name} --listen 8000:PORT",
                code="GPUCR-NOT-ON-DEMAND",
            ) from e
        except (OSError, RecordError) as e:
            raise self._damaged(name, e) from e

    def _damaged(self, name: str, why: Exception) -> InvalidRequest:
        return InvalidRequest(
            f"what is kept of the job {self.name} cannot be read: {self.path / name}: {reason_of(why)}",
            hint=f"remove the file, then serve it again: gpucr on-demand {self.name} --listen 8000:PORT",
            code="GPUCR-ON-DEMAND-DAMAGED",
        )


def on_demand() -> tuple[OnDemandFolder, ...]:
    """All jobs that are, or were, served on demand, by name."""
    try:
        names = sorted(name for name in os.listdir(_root()) if is_name(name))
    except FileNotFoundError:
        return ()
    return tuple(found for found in map(OnDemandFolder, names) if found.exists())


def _root() -> Path:
    try:
        return state_folder() / "on-demand"
    except OSError as e:
        raise _no_folder(e) from e


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise _no_folder(e) from e


def _no_folder(e: OSError) -> Unsupported:
    return Unsupported(
        f"what is kept of jobs that are served on demand cannot be written: {reason_of(e)}",
        hint="set XDG_STATE_HOME to a private folder that can be written",
        code="GPUCR-REGISTRY",
    )
