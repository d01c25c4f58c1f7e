"""A sidecar is a process of gpucr's own that stays with one job: a supervisor, or a forwarder. This is what it keeps.

A private folder per job in the state folder, with ``settings.json``, ``state.json`` (both written atomically),
``events.jsonl`` (append-only), a log and ``lock`` (flock(2), which ends with its holder).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from msgspec.structs import replace

from gpucr import records
from gpucr.errors import InvalidRequest, Unsupported, reason_of
from gpucr.jobs.names import is_name
from gpucr.jobs.record import MAX_RECORD_BYTES, Network
from gpucr.linux import durable, locks, processes, trusted_paths
from gpucr.linux.private_folders import state_folder
from gpucr.model import ProcessId
from gpucr.records import DEFAULT_PRIORITY, Priority, Record, RecordError, Text

_SETTINGS, _STATE, _EVENTS, _LOCK = "settings.json", "state.json", "events.jsonl", "lock"
_ENDED_S = 2.0
"""How long an ended sidecar's child may hold its lock."""
_ON_EVENT_LIMIT_S = 60.0


class StoredLaunch(Record, frozen=True):
    """How to start a job, first or again. ``environment``: the complete one. For the rest see `run_job`."""

    command: tuple[Text, ...]
    cwd: Text
    environment: Mapping[Text, Text]
    isolate: bool | None
    network: Network | None
    interpose: bool | None
    log: Text | None = None
    priority: Priority = DEFAULT_PRIORITY


class SidecarSettings(Record, frozen=True):
    """What the user has asked for."""

    def check(self) -> None:
        """Raise InvalidRequest for implausible values."""


class SidecarState(Record, frozen=True):
    """What outlives a sidecar. ``process``: the one that has the job; None: it was ended, and is not missing."""

    process: ProcessId | None = None


SettingsT = TypeVar("SettingsT", bound=SidecarSettings)
StateT = TypeVar("StateT", bound=SidecarState)
FolderT = TypeVar("FolderT", bound="SidecarFolder[Any, Any]")


class SidecarFolder(Generic[SettingsT, StateT]):
    """The folder of one job, for one kind of sidecar: a subclass. Reading raises InvalidRequest if a file is missing or
    damaged."""

    WORD: ClassVar[str]
    """What it is called: supervisor."""
    MODULE: ClassVar[str]
    """Its process runs the `main` of this module."""
    SERVED: ClassVar[str]
    """What a job is that has one: supervised."""
    BEGIN: ClassVar[str]
    """The command that gives a job one; ``{name}`` is the job's."""
    LEAVE: ClassVar[str]
    """The command that ends it."""
    NONE_CODE: ClassVar[str]
    DAMAGED_CODE: ClassVar[str]
    TAKEN_CODE: ClassVar[str]
    _FOLDER: ClassVar[str]
    _settings: ClassVar[type[SidecarSettings]]
    _state: ClassVar[type[SidecarState]]  # SettingsT and StateT

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = self._root() / name

    @classmethod
    def all(cls: type[FolderT]) -> tuple[FolderT, ...]:
        """Those of all jobs that have, or had, such a sidecar, by name. Raises Unsupported."""
        try:
            names = sorted(name for name in os.listdir(cls._root()) if is_name(name))
        except FileNotFoundError:
            return ()
        return tuple(found for found in map(cls, names) if found.exists())

    @property
    def log_path(self) -> Path:
        """Where the sidecar's own output goes."""
        return self.path / f"{self.WORD}.log"

    @property
    def events_path(self) -> Path:
        """The event log: one JSON object per line."""
        return self.path / _EVENTS

    def exists(self) -> bool:
        """Whether the job has, or had, such a sidecar."""
        return (self.path / _SETTINGS).exists()

    def settings(self) -> SettingsT:
        """How the job is served."""
        found: SettingsT = self._read(_SETTINGS, self._settings)
        try:
            found.check()
        except InvalidRequest as e:
            raise self._damaged(_SETTINGS, e) from e
        return found

    def state(self) -> StateT:
        """The state; the initial one if there is no such file."""
        try:
            found: StateT = self._read(_STATE, self._state)
        except InvalidRequest as e:
            if not isinstance(e.__cause__, FileNotFoundError):
                raise
            found = self._state()  # type: ignore[assignment]  # the subclass names its own
        return found

    def write_settings(self, settings: SettingsT) -> None:
        """Store these settings; the state stays. Raises Unsupported."""
        with self._writing():
            trusted_paths.make_private(self.path)
            durable.write(self.path / _SETTINGS, records.encode(settings))

    def write_state(self, state: StateT) -> None:
        """Store the state. Raises OSError."""
        durable.write(self.path / _STATE, records.encode(state))

    def change_state(self, **changes: Any) -> None:
        """For the holder of the lock if there is no sidecar. Raises InvalidRequest, Unsupported."""
        with self._writing():
            self.write_state(replace(self.state(), process=None, **changes))

    def append_event(self, event: Mapping[str, Any]) -> None:
        """Add a line to the event log. Raises OSError."""
        fd = trusted_paths.open_file(self.events_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
        try:
            os.write(fd, json.dumps(event).encode() + b"\n")
        finally:
            os.close(fd)

    def running(self) -> ProcessId | None:
        """The running sidecar; None if there is none."""
        with contextlib.suppress(InvalidRequest):
            found = self.state().process
            if found is not None and processes.is_alive(found):
                return found
        return None

    @contextlib.contextmanager
    def held(self, *, wait_s: float = 0.0) -> Iterator[None]:
        """Be the job's only sidecar of this kind for this block. Raises InvalidRequest if it has one, Unsupported.

        ``wait_s``: wait for an ended sidecar's child, which holds the lock until it calls exec. Without a sidecar
        others hold it for a moment only, and are waited for in any case.
        """
        if self.running() is None:
            wait_s = max(wait_s, _ENDED_S)
        fd = self._locked(wait_s)
        while not locks.is_lock_of(fd, self.path / _LOCK):  # its folder was removed meanwhile
            os.close(fd)
            fd = self._locked(wait_s)
        try:
            yield
        finally:
            os.close(fd)

    def _locked(self, wait_s: float) -> int:
        with contextlib.ExitStack() as undo:
            with self._writing():
                trusted_paths.make_private(self.path)
                fd = trusted_paths.open_file(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            undo.callback(os.close, fd)
            try:
                locks.lock(fd, wait_s=wait_s)
            except BlockingIOError:
                raise InvalidRequest(
                    f"the job {self.name} has a {self.WORD} already",
                    hint=f"`{self.LEAVE.format(name=self.name)}` ends it, and leaves the job as it is",
                    code=self.TAKEN_CODE,
                ) from None
            undo.pop_all()
            return fd

    def forget(self) -> None:
        """Another job has the name now: it is not served as the earlier one was. Log and events stay.

        Raises InvalidRequest while there is a sidecar, Unsupported.
        """
        if self.exists():
            with self.held(), self._writing():
                (self.path / _SETTINGS).unlink(missing_ok=True)
                self.forget_state()

    def forget_state(self) -> None:
        """Begin with a new state. Raises Unsupported."""
        with self._writing():
            (self.path / _STATE).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder. Raises InvalidRequest while there is a sidecar."""
        if self.path.exists():
            with self.held(wait_s=_ENDED_S):
                locks.remove_left_aside(self.path.parent)
                with contextlib.suppress(OSError):
                    locks.remove_folder(self.path)

    def _read(self, name: str, kind: type[Any]) -> Any:
        try:
            fd = trusted_paths.open_file(self.path / name, os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(fd, "rb") as file:
                return records.decode(file.read(MAX_RECORD_BYTES), kind)
        except FileNotFoundError as e:
            raise self.none(f"the job {self.name} is not {self.SERVED}") from e
        except (OSError, RecordError) as e:
            raise self._damaged(name, e) from e

    def none(self, message: str) -> InvalidRequest:
        """The error that there is no sidecar."""
        return InvalidRequest(message, hint=f"start one: {self._begin()}", code=self.NONE_CODE)

    def _damaged(self, name: str, why: Exception) -> InvalidRequest:
        return InvalidRequest(
            f"what is kept of the job {self.name} cannot be read: {self.path / name}: {reason_of(why)}",
            hint=f"remove the file, then: {self._begin()}",
            code=self.DAMAGED_CODE,
        )

    def _begin(self) -> str:
        return self.BEGIN.format(name=self.name)

    @classmethod
    def _root(cls) -> Path:
        try:
            return state_folder() / cls._FOLDER
        except OSError as e:
            raise _no_folder(e) from e

    @staticmethod
    @contextlib.contextmanager
    def _writing() -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise _no_folder(e) from e


def _no_folder(e: OSError) -> Unsupported:
    return Unsupported(
        f"what is kept of jobs that gpucr looks after cannot be written: {reason_of(e)}",
        hint="set XDG_STATE_HOME to a private folder that can be written",
        code="GPUCR-REGISTRY",
    )


class Journal(Generic[StateT]):
    """The state and the event log, as the sidecar writes them. A full disk, or a command that fails, never stops it.

    ``on_event``: the user's command that gets every event, as JSON on its stdin; no shell.
    """

    def __init__(
        self,
        folder: SidecarFolder[Any, StateT],
        on_event: Sequence[str] = (),
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._on_event = tuple(on_event)
        self._wall_s = wall_s
        self.state: StateT = folder.state()

    def update(self, **changes: Any) -> None:
        """Change members of the state."""
        self.state = replace(self.state, **changes)
        with contextlib.suppress(OSError):
            self._folder.write_state(self.state)

    def count(self, counter: str, what: str) -> None:
        """Increment one of a member's counters, by word."""
        before: Mapping[str, int] = getattr(self.state, counter)
        self.update(**{counter: {**before, what: before.get(what, 0) + 1}})

    def tell(self, event: str, **fields: Any) -> None:
        """Write an event to the log and to stderr, and pass it to the user's command."""
        now = as_time(self._wall_s(), "milliseconds")
        told = {"time": now, "event": event, "job": self._folder.name, "pid": os.getpid(), **fields}
        with contextlib.suppress(OSError):
            self._folder.append_event(told)
        words = " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)
        _say(f"{now} {event} {words}")
        if self._on_event:
            threading.Thread(target=self._call, args=(json.dumps(told),), daemon=True).start()

    def _call(self, told: str) -> None:
        try:
            subprocess.run(
                self._on_event,
                input=told + "\n",
                text=True,
                errors="replace",
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_ON_EVENT_LIMIT_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as e:
            _say(f"--on-event {self._on_event[0]}: {reason_of(e)}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def as_time(seconds: float, precision: str = "seconds") -> str:
    """Seconds since 1970 as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat("T", precision)
