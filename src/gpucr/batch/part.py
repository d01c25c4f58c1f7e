"""What runs on this node: the job, or its part of a job on several nodes. Started, restored, dumped, ended."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucr import Cancellation, dump_part, restore_part
from gpucr.batch.allocation import Allocation
from gpucr.batch.relay import Relay
from gpucr.batch.snapshots import JobSnapshots
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registered import registry, registry_in_use
from gpucr.linux import durable
from gpucr.linux.private_folders import state_folder
from gpucr.operations.dump import DumpReport, dump
from gpucr.operations.launch import forget_job, list_jobs, run_job
from gpucr.operations.places import count_used_gpus
from gpucr.operations.restore import restore

if TYPE_CHECKING:
    from gpucr import Manifest, Rendezvous

ENVIRONMENT_VARIABLE = "GPUCR_ENV_FILE"
"""Names the file with the batch system's variables of the job's current allocation."""

_RESTORE_S = 3600.0
"""A node that reads its part slowly keeps the others waiting, which run nothing yet."""
_SAVE_S = 600.0
"""At least so long a set that leaves the job running may take, from the meeting until all is in the store."""


class Part:
    """See the module. ``for_sets``: where the nodes meet; None: there is one. ``say`` gets lines for the job's log."""

    def __init__(
        self,
        command: tuple[str, ...],
        allocation: Allocation,
        snapshots: JobSnapshots,
        run_options: dict[str, Any],
        for_sets: Rendezvous | None,
        every_s: float | None,
        say: Callable[[str], None],
    ) -> None:
        self._command = command
        self._allocation = allocation
        self._snapshots = snapshots
        self._run_options = run_options
        self._for_sets = for_sets
        self._every_s = every_s
        self._say = say

    def begin(self, wanted: str | None, cancel: Cancellation) -> tuple[JobRecord, Relay]:
        """Restore the snapshot, or the set, of this id; None: start from scratch."""
        environment_file = self._write_environment()
        return self._start(environment_file, cancel) if wanted is None else self._restore(wanted, cancel)

    def dump(self, limit_s: float | None, cancel: Cancellation, *, leave_running: bool) -> DumpReport:
        """One attempt, as `gpucr.dump` or `gpucr.dump_part`."""
        name, place, key = self._snapshots.job_name, self._snapshots.place, self._snapshots.key
        if self._for_sets is None:
            return dump(name, place, leave_running=leave_running, key=key, timeout_s=limit_s, cancel=cancel)
        limit_s = max(_SAVE_S, self._every_s or 0) if limit_s is None else limit_s
        made = dump_part(
            name, place, self._for_sets, leave_running=leave_running, key=key, timeout_s=limit_s, cancel=cancel
        )
        return made.report

    def forget(self) -> None:
        """Remove its record and its log, which do no harm."""
        forget_job(self._snapshots.job_name)

    def forget_environment(self) -> None:
        """Remove the file with the variables of this allocation."""
        with contextlib.suppress(OSError):
            self._environment_path().unlink(missing_ok=True)

    def _start(self, environment_file: Path, cancel: Cancellation) -> tuple[JobRecord, Relay]:
        self._forget_lost_start()
        if self._allocation.has_alone(Path.cwd()):
            self._say(
                f"warning: the job runs in {Path.cwd()}, which only this place has: it can be restored in no other"
            )
        environment = {**os.environ, ENVIRONMENT_VARIABLE: str(environment_file)}
        started = run_job(
            self._command,
            name=self._snapshots.job_name,
            environment=environment,
            several_nodes=self._for_sets is not None,
            ends_with_caller=True,
            cancel=cancel,
            **self._run_options,
        )
        self._say(f"started as {started.record.name}: there is no snapshot of {self._allocation.id}")
        return started.record, Relay(started.record.log, 0)

    def _restore(self, wanted: str, cancel: Cancellation) -> tuple[JobRecord, Relay]:
        found = self._snapshots.open(wanted, self._command)
        log = found.manifest.launch.log_path if found.manifest.launch is not None else ""
        size = os.path.getsize(log) if os.path.isfile(log) else 0
        gpu = self._gpus_for(found.manifest)
        begin = time.monotonic()
        if self._for_sets is None:
            report = restore(found, gpu=gpu, ends_with_caller=True, cancel=cancel)
        else:
            report = restore_part(
                self._snapshots.where(wanted),
                self._for_sets,
                gpu=gpu,
                addresses="auto",
                key=self._snapshots.key,
                timeout_s=_RESTORE_S,
                ends_with_caller=True,
                cancel=cancel,
            ).report
        for warning in report.warnings:
            self._say(f"warning: {warning}")
        self._say(f"restored from {found.where} in {time.monotonic() - begin:.1f} s")
        record = _record(report.name or self._snapshots.job_name)
        return record, Relay(record.log, min(size, record.log.stat().st_size))

    def _forget_lost_start(self) -> None:
        """Remove the record of a start on a failed node, which is visible to nodes that share a home folder."""
        name = self._snapshots.job_name
        if not self._allocation.is_first and any(
            job.name == name and job.state.word == "elsewhere" for job in list_jobs()
        ):
            forget_job(name, force=True)

    def _gpus_for(self, manifest: Manifest) -> str | None:
        """The GPUs of the allocation that the job goes to: the first ones, if it uses fewer than it was given."""
        given = self._allocation.gpus
        if given is None or not manifest.has_gpu_state:
            return None
        return ",".join(given.split(",")[: count_used_gpus(manifest)]) or None

    def _environment_path(self) -> Path:
        node = "" if self._for_sets is None else f".{self._for_sets.node}"
        return state_folder() / "batch" / f"{self._allocation.id}{node}.env"

    def _write_environment(self) -> Path:
        path = self._environment_path()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        durable.write(path, self._allocation.as_shell().encode())
        return path


def _record(name: str) -> JobRecord:
    with registry_in_use():
        return registry().find(name).readable()
