"""A supervisor's work on its job: check it, take checkpoints, end it, restart it. All through the public API."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from msgspec import Struct

from gpucr import Cancellation, JobSnapshot, Secret, SnapshotInStore, open_snapshot
from gpucr.driver.gpus import gpu_processes
from gpucr.errors import GpucrError, InvalidRequest, StoreDamaged
from gpucr.jobs.record import JobRecord, JobState, state_of
from gpucr.jobs.registered import registry
from gpucr.jobs.sidecar import StoredLaunch
from gpucr.linux import processes, trusted_paths
from gpucr.model import ProcessId
from gpucr.operations.dump import dump
from gpucr.operations.end_job import end_processes
from gpucr.operations.launch import launch
from gpucr.operations.places import where_it_was
from gpucr.operations.rehearse import rehearse
from gpucr.operations.requests import LaunchRequest
from gpucr.operations.restore import restore
from gpucr.operations.stores import list_snapshots, prune_store, verify_snapshots
from gpucr.operations.suspend import resume_left_behind
from gpucr.supervise import policy
from gpucr.supervise.gpus import good_gpus
from gpucr.supervise.reading import Reading
from gpucr.supervise.settings import Supervision


class Look(Struct, frozen=True):
    """The current state of a job. ``reason`` says how it ended, in words; ``kind`` is the reason of its restart.

    ``running``; ``lent``: a borrower has its GPUs, and brings it back, or it sleeps until it is asked; ``done``: exit
    code 0; ``failed``; ``dumped``: a dump has ended it, and a snapshot has it; ``elsewhere``: it may run on another
    machine or in another container, where it was started or restored.
    """

    word: Literal["running", "lent", "done", "failed", "dumped", "elsewhere"]
    reason: str = ""
    kind: Literal["exit", "signal", "lost"] = "lost"


class Checkpoint(Struct, frozen=True):
    """A snapshot that was taken. ``downtime_s``: how long the job was stopped; ``written_bytes``: new in the store."""

    id: str
    downtime_s: float
    seconds: float
    size_bytes: int
    written_bytes: int


class SupervisedJob(Protocol):
    """The job, as the supervisor sees it. Failures are GpucrError, and leave the job as it was."""

    def look(self) -> Look:
        """Its fate."""

    def log_size(self) -> int:
        """How many bytes it has printed."""

    def checkpoint(self, cancel: Cancellation, *, end: bool = False, timeout_s: float | None = None) -> Checkpoint:
        """Take a snapshot and verify it. The job keeps running, unless ``end``."""

    def rehearse(self, snapshot: str, cancel: Cancellation) -> float:
        """Restore a snapshot beside the job, and end that. Returns the seconds. RehearsalFailed: it is no good."""

    def snapshots(self) -> Sequence[str]:
        """The ids of its snapshots in the store, newest first by the store's clock."""

    def resume(self) -> bool:
        """Let it run again if it stands still, and nobody works on it. Returns whether it did that."""

    def end(self) -> None:
        """Kill the rest of it."""

    def restore(self, snapshot: str, cancel: Cancellation, *, bad_gpus: Collection[str]) -> Sequence[str]:
        """Bring it back from a snapshot. Returns warnings."""

    def start_again(self, how: StoredLaunch) -> None:
        """Start it again, with the same name and log."""

    def mark(self, text: str) -> None:
        """Write a line from gpucr into its log."""

    def prune(self, protected: Collection[str], counted: Collection[str] | None) -> int:
        """Remove snapshots according to the rules, never the ``protected`` ones. Returns how many.

        ``counted``: the rules keep only some of these (None: of all).
        """

    def gpus(self) -> Collection[str]:
        """The UUIDs of the GPUs that it uses."""


class RegisteredJob:
    """A job of the registry."""

    def __init__(self, name: str, settings: Supervision, key: Secret | None) -> None:
        self._name = name
        self._settings = settings
        self._key = key
        self._known: tuple[ProcessId, ...] = ()
        self._reading: Reading | None = None
        self._last: JobRecord | None = None

    def look(self) -> Look:
        """From the registry; remembers its tree, so that killing it later misses nothing."""
        record = self._latest()
        if record is None:
            return Look("failed", "its record is gone or damaged")
        state = state_of(record)
        if record.lent is not None or (record.asleep and state.word in ("running", "dumped")):
            return Look("lent")
        if state.word == "running":
            with contextlib.suppress(GpucrError):
                self._known = tuple(each.id for each in processes.tree(record.pid))
            return Look("running")
        return _ended(state)

    def require_here(self) -> None:
        """Raise InvalidRequest if it may run on another machine or in another container, or nobody can say."""
        listed = registry().look(self._name)
        if listed is None:
            return
        record = listed.record
        if record is None:
            raise InvalidRequest(
                f"the record of the job {self._name} is damaged: {listed.state.problem}",
                hint=f"end the job if it runs, then `gpucr jobs --forget {self._name}`, "
                f"`gpucr restore {self._settings.store}#{self._name}`, and supervise it again",
                code="GPUCR-REGISTRY",
            )
        if listed.state.word == "elsewhere":
            raise InvalidRequest(
                f"the job {self._name} was started on {record.host}, maybe in a container, and may run there",
                hint=f"supervise it there; if that is gone, `gpucr jobs --forget {self._name} --force`, "
                f"`gpucr restore {self._settings.store}#{self._name}`, and supervise it again",
                code="GPUCR-JOB-NOT-RUNNING",
            )

    def _latest(self) -> JobRecord | None:
        """Its record, or the last one that could be read."""
        listed = registry().look(self._name)
        if listed is not None and listed.record is not None:
            self._last = listed.record
        return self._last

    def log_size(self) -> int:
        """0 if the log cannot be read."""
        with contextlib.suppress(OSError):
            return self._record().log.stat().st_size
        return 0

    def checkpoint(self, cancel: Cancellation, *, end: bool = False, timeout_s: float | None = None) -> Checkpoint:
        """A dump into the store under the job's name."""
        if self._reading is not None:
            self._reading.end()
        began = time.monotonic()
        report = dump(
            self._name,
            f"{self._settings.store}#{self._name}",
            leave_running=not end,
            key=self._key,
            timeout_s=timeout_s,
            cancel=cancel,
        )
        snapshot = report.snapshot
        if not isinstance(snapshot, SnapshotInStore):
            raise AssertionError("a dump into a store has made another snapshot")
        problems = verify_snapshots(self._where(snapshot.stored.id), key=self._key).problems
        if problems:
            first = next(sentence for sentences in problems.values() for sentence in sentences)
            raise StoreDamaged(
                f"the snapshot {snapshot.where} was written and is damaged: {first}",
                path=snapshot.where,
                hint=f"check the store: gpucr verify {self._settings.store}",
            )
        if not end:
            self._reading = Reading(self._where(snapshot.stored.id), self._key)
        return Checkpoint(
            id=snapshot.stored.id,
            downtime_s=report.downtime_s,
            seconds=time.monotonic() - began,
            size_bytes=report.size_bytes,
            written_bytes=report.counts.written_bytes,
        )

    def rehearse(self, snapshot: str, cancel: Cancellation) -> float:
        """In a sandbox, on GPUs where they have room."""
        return rehearse(self._where(snapshot), key=self._key, cancel=cancel).seconds

    def snapshots(self) -> Sequence[str]:
        """Those with its name that were taken here, and the one that it came from.

        Another machine's job may have its name: that one's snapshots are no way back for this one.
        """
        record, here = self._latest(), platform.node()
        origin = record.snapshot.rpartition("#")[2] if record is not None and record.snapshot is not None else None
        found = list_snapshots(self._settings.store, key=self._key).snapshots
        named = [each for each in reversed(found) if each.name == self._name]
        return [each.id for each in named if each.host == here or each.id == origin]

    def resume(self) -> bool:
        """Only if no process that it had is gone. What prevents it is left to the restart."""
        if not all(map(processes.keeps_running, self._known)):
            return False
        with contextlib.suppress(GpucrError, OSError):
            return resume_left_behind(self._name)
        return False

    def end(self) -> None:
        """SIGKILL to all of it. If a process hangs in the kernel, the restore will report that its pids are taken."""
        record = self._latest()
        if record is not None and state_of(record).word != "elsewhere":
            end_processes(record, self._known)
        self._known = ()

    def restore(self, snapshot: str, cancel: Cancellation, *, bad_gpus: Collection[str]) -> Sequence[str]:
        """On its own GPUs or, if these are gone or bad, on others of the same model. Under no other name."""
        opened = open_snapshot(self._where(snapshot), self._key)
        gpu = _gpus_for(opened, bad_gpus)
        report = restore(opened, name=self._name, files=self._settings.files, gpu=gpu, cancel=cancel)
        return (*report.warnings, *report.gpu_reasons)

    def start_again(self, how: StoredLaunch) -> None:
        """Its log is kept and continued."""
        launch(replace(LaunchRequest.stored(how, self._name), log=self._record().log))

    def mark(self, text: str) -> None:
        """On its own line. Errors writing the log are ignored."""
        with contextlib.suppress(OSError, GpucrError):
            fd = trusted_paths.open_file(self._record().log, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.write(fd, f"\n=== gpucr: {text} ===\n".encode())
            finally:
                os.close(fd)

    def prune(self, protected: Collection[str], counted: Collection[str] | None) -> int:
        """According to the options."""
        rules = policy.prune_rules(self._settings, self._name, platform.node(), protected, counted)
        return len(prune_store(self._settings.store, rules, key=self._key).removed)

    def gpus(self) -> Collection[str]:
        """As NVML sees its processes."""
        pids = {each.pid for each in self._known}
        return {use.gpu_uuid for use in gpu_processes() if use.pid in pids}

    def _where(self, snapshot_id: str) -> str:
        return f"{self._settings.store}#{snapshot_id}"

    def _record(self) -> JobRecord:
        record = registry().find(self._name).record
        if record is None:
            raise FileNotFoundError(f"the record of the job {self._name} is damaged")
        return record


def _ended(state: JobState) -> Look:
    if state.word in ("dumped", "elsewhere"):
        return Look(state.word)
    if state.exit_code == 0:
        return Look("done")
    if state.exit_code is not None:
        return Look("failed", f"exit code {state.exit_code}", "exit")
    if state.signal is not None:
        return Look("failed", f"signal {state.signal}", "signal")
    return Look("failed", "it ended, and nobody can say how")


def _gpus_for(snapshot: JobSnapshot, bad: Collection[str]) -> str | None:
    """The job's new GPUs, for `restore`; None: unchanged. Raises Unsupported if there are too few good ones."""
    if not snapshot.manifest.has_gpu_state:
        return None
    choice, here = where_it_was(snapshot)
    used = [gpu for gpu in choice.had if gpu.uuid in choice.needed_bytes]
    return good_gpus(used, choice.needed_bytes, here, bad)
