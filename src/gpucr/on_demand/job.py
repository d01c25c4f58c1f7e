"""The job of a forwarder: where it is, how it is put to sleep and woken, and its port. Blocking; through operations."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from gpucr import Cancellation, Secret
from gpucr.driver.gpus import list_gpus, visible_gpus
from gpucr.errors import GpucrError, InvalidRequest, NotACudaProcess, NotPermitted, Unsupported, reason_of
from gpucr.gpu_state import suspended
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registered import registry, registry_in_use
from gpucr.jobs.sidecar import Journal
from gpucr.linux import claims, namespaces, processes
from gpucr.model import CudaState, GpuMap
from gpucr.on_demand.folder import OnDemandFolder
from gpucr.on_demand.policy import Bytes, Place
from gpucr.on_demand.settings import ANY_GPU, OnDemand
from gpucr.operations.chosen import when_free
from gpucr.operations.dump import dump
from gpucr.operations.launch import launch
from gpucr.operations.listing import ProcessState, job_states
from gpucr.operations.requests import LaunchRequest
from gpucr.operations.restore import restore
from gpucr.operations.stores import remove_snapshot
from gpucr.operations.suspend import resume, suspend
from gpucr.records import DEFAULT_PRIORITY
from gpucr.supervise.folder import SupervisedFolder

Where = Literal["awake", "asleep", "stored", "unstarted", "lent", "gone"]
"""``asleep``: in host memory. ``stored``: in a snapshot. ``lent``: a borrower has its GPUs. ``gone``: it has ended."""

_BUSY_S = 60.0
"""How long a sleep or a wake waits for another gpucr's work on the job, such as a supervisor's checkpoint."""


class Seen(Struct, frozen=True):
    """Where the job is; ``device_bytes``: what it has on its GPUs, or needs there. ``why``: of a job that is gone."""

    where: Where
    device_bytes: Bytes | None = None
    priority: int = DEFAULT_PRIORITY
    why: str = ""


class ServedJob:
    """A job of the registry that is served on demand, or will be in it once it has started."""

    def __init__(self, folder: OnDemandFolder, settings: OnDemand) -> None:
        self.name = folder.name
        self._settings = settings
        self.journal = Journal(folder, settings.on_event)
        self._record: JobRecord | None = None

    # --- where it is -----------------------------------------------------------------------------------------------

    def look(self) -> Seen:
        """Where it is now. Raises Unsupported if the registry cannot be read."""
        with registry_in_use():
            listed = registry().look(self.name)
        record = self._record = listed.record if listed is not None else None
        known = self.journal.state.device_bytes or None
        if listed is None or record is None:
            return self._without("it was forgotten" if listed is None else "its record is damaged")
        if record.lent is not None:
            return Seen("lent", known, record.priority)
        word = listed.state.word
        if word == "dumped" and record.asleep:
            return Seen("stored", known, record.priority)
        if word != "running":
            return self._without(f"it does not run any more ({word})")
        try:
            states = job_states(self.name)
        except NotACudaProcess:
            return Seen("awake", known, record.priority)
        except (GpucrError, OSError) as e:
            return Seen("gone", known, record.priority, reason_of(e))
        if any(each.state is CudaState.CHECKPOINTED for each in states) or _is_left_behind(states):
            notes = [suspended.recall(each.process.id) for each in states]
            left = _sum(note.device_bytes for note in notes if note)
            # Awake it also had what the driver takes for itself.
            needs = {uuid: max(size_bytes, (known or {}).get(uuid, 0)) for uuid, size_bytes in left.items()}
            return Seen("asleep", needs or known, record.priority)
        return Seen("awake", _sum(each.device_bytes for each in states) or known, record.priority)

    def _without(self, why: str) -> Seen:
        first, known = self._settings.first_start, self.journal.state.device_bytes or None
        if first is None:
            return Seen("gone", known, why=why)
        return Seen("unstarted", known, first.priority)

    def comes_back(self) -> bool:
        """Whether somebody is about to bring back a job that is gone: its supervisor."""
        with contextlib.suppress(GpucrError):
            return SupervisedFolder(self.name).running() is not None
        return False

    def may_use(self) -> tuple[str, ...]:
        """The GPUs of a job whose needs are not known: those that it sees."""
        first = self._settings.first_start
        variables: Mapping[str, str] = os.environ if first is None else first.environment
        return tuple(gpu.uuid for gpu in visible_gpus(list_gpus(), variables))

    def wake_on(self) -> tuple[str, ...]:
        """The GPUs on which it may wake, besides its own."""
        named = self._settings.wake_on
        return tuple(gpu.uuid for gpu in list_gpus()) if named == (ANY_GPU,) else named

    def learn_needs(self, seen: Seen) -> Bytes | None:
        """What it needs on its GPUs; noted for when it has ended."""
        found = seen.device_bytes
        if found and found != self.journal.state.device_bytes:
            self.journal.update(device_bytes=dict(found))
        return found

    # --- to sleep and back -----------------------------------------------------------------------------------------

    def sleep(self, cancel: Cancellation) -> None:
        """Put it to sleep in host memory. On failure it is as it was found. Raises as `suspend` does.

        Where host memory is short it is not dumped instead: a dump takes as much, for a while (measured).
        """
        begun_s = time.monotonic()
        self._mark(asleep=True)
        try:
            when_free(lambda: suspend(self.name, cancel=cancel), cancel, _BUSY_S)
        except BaseException:
            with contextlib.suppress(GpucrError):
                self._mark(asleep=False)
            raise
        self.journal.update(sleep_s=time.monotonic() - begun_s, asleep_since_s=time.time())

    def store(self, cancel: Cancellation) -> None:
        """It sleeps: move it from host memory to the store. On failure it sleeps as before. Raises as `dump` does."""
        place = f"{self._settings.sleep_to}#{self.name}"
        when_free(lambda: dump(self.name, place, key=self._key(), cancel=cancel), cancel, _BUSY_S)

    def wake(self, seen: Seen, place: Place, cancel: Cancellation) -> None:
        """Bring it back to GPUs, from where it is; or start it. Raises as `resume`, `restore` and `run_job` do."""
        begun_s = time.monotonic()
        if seen.where == "asleep":
            self._resume(place, cancel)
        elif seen.where == "stored":
            record = self.record()
            stored = record.snapshot if record is not None and record.snapshot is not None else ""
            when_free(lambda: restore(stored, key=self._key(), cancel=cancel), cancel, _BUSY_S)
            self._remove(stored)
            if self.look().where == "asleep":  # as it was when it was dumped
                self._resume(place, cancel)
        elif seen.where == "unstarted":
            self._start(cancel)
        self._mark(asleep=False)
        self.journal.update(wake_s=time.monotonic() - begun_s, asleep_since_s=None)

    def _resume(self, place: Place, cancel: Cancellation) -> None:
        moved = {old: new for old, new in place.items() if old != new}
        gpu_map = GpuMap(tuple(place.items())) if moved else None
        when_free(lambda: resume(self.name, gpu_map=gpu_map, cancel=cancel), cancel, _BUSY_S)

    def note(self, *, asleep: bool) -> None:
        """Somebody else has woken it, or put it to sleep: note that, so that it counts as if the forwarder had."""
        with contextlib.suppress(GpucrError):
            self._mark(asleep=asleep)
        if asleep is (self.journal.state.asleep_since_s is None):
            self.journal.update(asleep_since_s=time.time() if asleep else None)

    def _start(self, cancel: Cancellation) -> None:
        first = self._settings.first_start
        if first is None:
            raise InvalidRequest(f"nothing says how {self.name} is started", hint="start it with `gpucr run`")
        launch(LaunchRequest.stored(first, self.name), cancel)
        self.look()  # its port is in the network that it has now

    def _key(self) -> Secret | None:
        return None if self._settings.key_file is None else Secret.in_file(self._settings.key_file)

    def _remove(self, stored: str) -> None:
        """What cannot be removed stays in the store, where `gpucr ls` shows it."""
        with contextlib.suppress(GpucrError):
            remove_snapshot(stored, key=self._key())

    def _mark(self, *, asleep: bool) -> None:
        """Tell supervisors: they wait for a job that is put to sleep."""
        with registry_in_use():
            listed = registry().look(self.name)
            if listed is not None and listed.record is not None and listed.record.asleep is not asleep:
                registry().update(listed.record, asleep=asleep)

    # --- its port --------------------------------------------------------------------------------------------------

    def socket(self, family: socket.AddressFamily) -> socket.socket:
        """A socket in the job's network, as of the last look. Raises NotPermitted, Unsupported, OSError."""

        def make() -> socket.socket:
            return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

        if self._record is None:
            raise Unsupported(f"the job {self.name} has not started", hint="ask again later")
        if not has_own_network(self._record):
            return make()
        return in_network_of(self._record, make)

    def record(self) -> JobRecord | None:
        with registry_in_use():
            listed = registry().look(self.name)
        return listed.record if listed is not None else None


def _is_left_behind(states: Sequence[ProcessState]) -> bool:
    """Whether it is locked, and nobody works on it: a gpucr was killed together with its guard. A resume ends that."""
    if all(each.state is not CudaState.LOCKED for each in states):
        return False
    return not claims.at_work_on(each.process.pid for each in states)


def _sum(parts: Iterable[Bytes]) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in parts:
        for uuid, size_bytes in part.items():
            found[uuid] = found.get(uuid, 0) + size_bytes
    return found


def has_own_network(record: JobRecord) -> bool:
    """Whether its port is reached in its own network only."""
    return record.isolated and record.network == "own"


def in_network_of(record: JobRecord, action: Callable[[], socket.socket]) -> socket.socket:
    """Call ``action`` in the job's network. Raises NotPermitted, Unsupported (it has ended), OSError."""
    try:
        with namespaces.opened(record.pid, "net") as fds:
            if not processes.is_alive(record.root):
                raise ProcessLookupError
            return namespaces.in_namespace(fds["net"], "net", action)
    except PermissionError as e:
        raise NotPermitted(
            f"the network of the job {record.name} cannot be entered: {e.strerror}",
            pid=record.pid,
            hint="serve it as root, or start it with --network host",
        ) from e
    except (FileNotFoundError, ProcessLookupError) as e:
        raise Unsupported(
            f"the job {record.name} has ended", hint=f"`gpucr logs {record.name}` shows its last output"
        ) from e
