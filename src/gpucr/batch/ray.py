"""Command-line GPU jobs on a Ray cluster: a job from `submit` continues elsewhere if its node is drained or dies.

Needs ``gpucr[ray]``, on all nodes, and a store that all of them reach. Connect first: ``ray.init(address="auto")``.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpucr import extras
from gpucr.batch.allocation import Allocation
from gpucr.batch.ray_agent import RayJob
from gpucr.batch.ray_queue import JobStatus, Queue
from gpucr.batch.snapshots import require_store
from gpucr.errors import DeadlineExceeded, GpucrError, InvalidRequest

__all__ = ["Job", "JobStatus", "find_job", "list_jobs", "submit"]

_QUEUE = "gpucr"
_WAIT_S = 10.0
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class Job:
    """A job on the cluster. Any process connected to the cluster can get one: `find_job`."""

    id: str

    def status(self) -> JobStatus:
        """Its current state."""
        found: JobStatus = _ask("status", self.id)
        return found

    def logs(self) -> str:
        """Its and gpucr's output so far. Output after the last snapshot may appear twice."""
        return b"".join(self._pieces()).decode(errors="replace")

    def follow(self) -> Iterator[str]:
        """Its output, until it has ended."""
        position = 0
        while True:
            is_over = self.status().state in ("done", "failed", "cancelled")
            for piece in self._pieces(position):
                position += len(piece)
                yield piece.decode(errors="replace")
            if is_over:
                return
            time.sleep(_LOOK_EVERY_S)

    def result(self, timeout_s: float | None = None) -> int:
        """Wait for its end, and return its exit code (128 and the signal's number if a signal ended it).

        Raises DeadlineExceeded if it has not ended after ``timeout_s``, GpucrError if it has none: cancelled, or gpucr
        itself was killed.
        """
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not _ask("wait", self.id, max(0.0, min(_WAIT_S, end_s - time.monotonic()))):
            if time.monotonic() >= end_s:
                raise DeadlineExceeded(
                    f"the job {self.id} has not ended after {timeout_s:g} s: it is {self.status().state}"
                )
        status = self.status()
        if status.exit_code is None:
            raise GpucrError(f"the job {self.id} has no exit code: {status.reason}", hint="its log may say more")
        return status.exit_code

    def migrate(self) -> None:
        """Running → dumped → running on another node. Returns at once. Raises InvalidRequest if there is none."""
        _ask("move", self.id)

    def preempt(self) -> None:
        """Running → dumped, with its GPUs free, until `resume`. Returns at once. Raises InvalidRequest."""
        _ask("hold", self.id)

    def resume(self) -> None:
        """Held or failed → in the queue again. Raises InvalidRequest for another state."""
        _ask("resume", self.id)

    def cancel(self) -> None:
        """End it, without a dump. Its snapshots stay in the store."""
        _ask("cancel", self.id)

    def _pieces(self, position: int = 0) -> Iterator[bytes]:
        while piece := _ask("log", self.id, position):
            position += len(piece)
            yield piece


def submit(
    cmd: Sequence[str],
    *,
    store: str | os.PathLike[str],
    gpus: int = 1,
    priority: int = 0,
    id: str | None = None,  # noqa: A002 - as in `gpucr batch --id`
    cpus: float = 1,
    every_s: float | None = 600.0,
    grace_s: float = 60.0,
    cwd: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    isolate: bool | None = None,
) -> Job:
    """Add a job to the cluster's queue, and return at once.

    It starts, as with `gpucr batch`, on a node where Ray has ``gpus`` GPUs and ``cpus`` CPUs for it: in ``cwd``
    (default: the caller's), with the node's environment and ``environment``. Where ``store`` has a snapshot of ``id``
    that is restored instead. ``every_s``: the interval of dumps (seconds; None: never), for nodes that die without
    notice; ``grace_s``: how long the dump on leaving a node may take. Jobs with a higher ``priority`` come first, and
    displace those with a lower one.

    Raises InvalidRequest (no cluster, an id that is in use, ...), BrokenInstall without Ray.
    """
    if isinstance(cmd, str) or not cmd:
        raise InvalidRequest("cmd is not a list of words", hint='as in ["python3", "train.py"]')
    if gpus < 1:
        raise InvalidRequest(f"a job needs a GPU, not {gpus}", hint="Ray runs other jobs better by itself")
    if grace_s <= 0 or (every_s is not None and every_s <= 0):
        raise InvalidRequest("grace_s and every_s are more than 0 seconds")
    place = require_store(os.fspath(store))
    job = RayJob(
        id=Allocation.of({}, id or f"ray-{secrets.token_hex(6)}").id,
        command=tuple(cmd),
        store=place if "://" in place else os.path.abspath(place),
        gpus=gpus,
        cpus=cpus,
        priority=priority,
        cwd=os.path.abspath(os.getcwd() if cwd is None else cwd),
        environment=tuple((environment or {}).items()),
        grace_s=grace_s,
        every_s=every_s,
        isolate=isolate,
    )
    _ask("submit", job)
    return Job(job.id)


def find_job(job_id: str) -> Job:
    """A job submitted earlier by anybody. Raises InvalidRequest if there is none."""
    _ask("status", job_id)
    return Job(job_id)


def list_jobs() -> list[JobStatus]:
    """All jobs of this cluster, in order of submission."""
    found: list[JobStatus] = _ask("jobs")
    return found


def _ask(method: str, *arguments: Any) -> Any:
    ray = extras.load("ray", "gpucr.batch.ray")
    if not ray.is_initialized():
        raise InvalidRequest("there is no connection to a Ray cluster", hint='call ray.init(address="auto") first')
    queue = (
        ray.remote(Queue)
        .options(
            name=_QUEUE,
            namespace=_QUEUE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},
            max_concurrency=1000,
        )
        .remote()
    )
    try:
        return ray.get(getattr(queue, method).remote(*arguments))
    except ray.exceptions.RayTaskError as e:
        if isinstance(e.cause, GpucrError):
            raise e.cause from None
        raise
