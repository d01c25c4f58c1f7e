"""The job queue on a Ray cluster: which job is placed next, which gives way, and the state of each.

An actor on the head node. Ray places: the queue asks it for one job at a time, the first in its order, so that a job of
a lower priority never takes what a higher one waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpucr import extras
from gpucr.batch.contract import REQUEUE_EXIT
from gpucr.batch.ray_agent import RayJob, agent_of
from gpucr.errors import InvalidRequest
from gpucr.linux.private_folders import state_folder

State = Literal["waiting", "running", "leaving", "held", "done", "failed", "cancelled"]
_OVER = ("done", "failed", "cancelled")
_LOOK_EVERY_S = 0.25
_LOG_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class JobStatus:
    """A job's state. ``node``: where it runs; ``starts``: how often it was placed; ``reason``: the last event.

    ``exit_code``: the job's own, or that of `gpucr batch` if it could not be started.
    """

    id: str
    state: State
    node: str | None
    starts: int
    exit_code: int | None
    reason: str
    priority: int


@dataclass
class _Entry:
    job: RayJob
    order: int
    log: Path
    state: State = "waiting"
    node: str | None = None
    starts: int = 0
    exit_code: int | None = None
    reason: str = "submitted"
    avoid: str | None = None
    then: State = "waiting"
    """Its state after it has left its node."""
    agent: Any = None
    task: asyncio.Task[None] | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: the smallest is placed first."""
        return -self.job.priority, self.order


class Queue:
    """Holds all jobs, in memory; their logs are files of the head node."""

    def __init__(self) -> None:
        self._ray = extras.load("ray", "gpucr.batch.ray")
        self._entries: dict[str, _Entry] = {}
        self._submitted = 0
        self._folder = state_folder() / "ray"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._me: Any = self._ray.get_runtime_context().current_actor
        self._tending: asyncio.Task[None] | None = None

    async def submit(self, job: RayJob) -> None:
        """Add it. Raises InvalidRequest if a job of this id has not ended."""
        known = self._entries.get(job.id)
        if known is not None and known.state not in _OVER:
            raise InvalidRequest(f"the job {job.id} is {known.state} already", hint="give another id")
        log = self._folder / f"{job.id}.log"
        os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._submitted += 1
        self._entries[job.id] = _Entry(job, self._submitted, log)
        if self._tending is None:
            self._tending = asyncio.create_task(self._tend())

    async def append(self, job_id: str, piece: bytes) -> None:
        """A job's output."""
        with self._entries[job_id].log.open("ab") as log:
            log.write(piece)

    async def log(self, job_id: str, position: int) -> bytes:
        """A piece of its output from that position."""
        with self._entry(job_id).log.open("rb") as log:
            log.seek(position)
            return log.read(_LOG_PIECE_BYTES)

    async def status(self, job_id: str) -> JobStatus:
        """Its state. Raises InvalidRequest if there is no such job."""
        entry = self._entry(job_id)
        return JobStatus(
            job_id, entry.state, entry.node, entry.starts, entry.exit_code, entry.reason, entry.job.priority
        )

    async def jobs(self) -> list[JobStatus]:
        """All of them, in order of submission."""
        return [await self.status(job_id) for job_id in self._entries]

    async def wait(self, job_id: str, limit_s: float) -> bool:
        """Whether it has ended, waiting up to this many seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._entry(job_id).over.wait(), limit_s)
        return self._entry(job_id).over.is_set()

    async def move(self, job_id: str) -> None:
        """Dump it, and continue it on another node. Raises InvalidRequest if it does not run, or has no other."""
        entry = self._running(job_id)
        if not any(gpus >= entry.job.gpus for node, gpus in self._nodes().items() if node != entry.node):
            raise InvalidRequest(
                f"no other node of the cluster has {entry.job.gpus} GPUs for {job_id}", hint="the job runs on"
            )
        entry.avoid = entry.node
        self._leave(entry, "waiting", "migrates")

    async def hold(self, job_id: str) -> None:
        """Dump it, and keep it out of the queue until `resume`. Raises InvalidRequest if it is over."""
        entry = self._entry(job_id)
        if entry.state == "waiting":
            entry.state, entry.reason = "held", "preempted"
            await self._withdraw(entry)
        elif entry.state != "held":
            self._leave(self._running(job_id), "held", "preempted")

    async def resume(self, job_id: str) -> None:
        """Requeue a held or failed job. Raises InvalidRequest for another state."""
        entry = self._entry(job_id)
        if entry.state not in ("held", "failed"):
            raise InvalidRequest(f"the job {job_id} is {entry.state}: only one that is held or failed can be resumed")
        entry.state, entry.reason, entry.exit_code = "waiting", "resumed", None
        entry.over.clear()

    async def cancel(self, job_id: str) -> None:
        """End it; its snapshots stay. Does nothing if it is over."""
        entry = self._entry(job_id)
        if entry.state in _OVER:
            return
        await self._withdraw(entry)
        self._end(entry, "cancelled", None, "cancelled")

    def _entry(self, job_id: str) -> _Entry:
        if job_id not in self._entries:
            raise InvalidRequest(f"there is no job {job_id} on this cluster")
        return self._entries[job_id]

    def _running(self, job_id: str) -> _Entry:
        entry = self._entry(job_id)
        if entry.state != "running":
            raise InvalidRequest(f"the job {job_id} does not run: it is {entry.state}")
        return entry

    async def _tend(self) -> None:
        while True:
            try:
                self._leave_drained_nodes()
                await self._place()
            except Exception as e:  # noqa: BLE001 - the cluster's state could not be read
                self._note(f"the queue: {e}")
            await asyncio.sleep(_LOOK_EVERY_S)

    def _note(self, line: str) -> None:
        with (self._folder / "queue.log").open("a") as log:
            log.write(f"{time.time():.3f} {line}\n")

    # --- who is next ---------------------------------------------------------------------------------------------

    async def _place(self) -> None:
        """Have Ray place the first of the queue; jobs of a lower priority give way if there is no room for it."""
        waiting = sorted((e for e in self._entries.values() if e.state == "waiting"), key=lambda e: e.rank)
        if not waiting:
            return
        first = waiting[0]
        for entry in waiting[1:]:
            await self._withdraw(entry)  # another has come before it, and Ray has not placed it yet
        if first.task is None and first.state == "waiting":
            if first.avoid not in self._nodes():
                first.avoid = None
            first.task = asyncio.create_task(self._run(first))
        for victim in self._victims(first):
            self._leave(victim, "waiting", f"gives way to {first.job.id}")

    def _victims(self, first: _Entry) -> list[_Entry]:
        """The fewest lower-priority jobs, lowest and youngest first, that make room for it on one node."""
        found: list[list[_Entry]] = []
        for node, gpus in self._nodes().items():
            here = [e for e in self._entries.values() if e.node == node]
            free = gpus - sum(e.job.gpus for e in here if e.state == "running")
            chosen: list[_Entry] = []
            for entry in sorted(here, key=lambda e: e.rank, reverse=True):
                if free < first.job.gpus and entry.state == "running" and entry.job.priority < first.job.priority:
                    chosen.append(entry)
                    free += entry.job.gpus
            if free >= first.job.gpus and node != first.avoid:
                found.append(chosen)
        return min(found, key=len, default=[])

    # --- the cluster ---------------------------------------------------------------------------------------------

    def _nodes(self) -> dict[str, int]:
        """The number of GPUs of each living node that is not drained."""
        drained = self._drained()
        return {
            node["NodeID"]: int(node["Resources"].get("GPU", 0))
            for node in self._ray.nodes()
            if node["Alive"] and node["NodeID"] not in drained
        }

    def _drained(self) -> dict[str, int]:
        from ray._private.state import state  # not in Ray's public API (2.60)

        found: dict[str, int] = state.get_draining_nodes()
        return found

    def _leave_drained_nodes(self) -> None:
        drained = self._drained()
        for entry in self._entries.values():
            if entry.state == "running" and entry.node in drained:
                self._leave(entry, "waiting", "its node is drained")

    # --- one start -----------------------------------------------------------------------------------------------

    def _leave(self, entry: _Entry, then: State, reason: str) -> None:
        entry.state, entry.then, entry.reason = "leaving", then, reason
        entry.agent.leave.remote()

    async def _run(self, entry: _Entry) -> None:
        """From its placement to the end of that start."""
        entry.agent = agent_of(entry.job, self._me, entry.avoid)
        try:
            entry.node = await entry.agent.node.remote()
            entry.state, entry.then = "running", "waiting"
            entry.avoid = None
            entry.starts += 1
            is_first = entry.log.stat().st_size == 0  # a start lost before gpucr's first message has made no store
            code = await entry.agent.run.remote(is_first)
            self._ended(entry, code)
        except self._ray.exceptions.RayTaskError as e:
            self._end(entry, "failed", None, str(e.cause))
        except self._ray.exceptions.RayError as e:
            entry.state = entry.then
            entry.reason = f"its place was lost: {str(e).splitlines()[0]}"
        finally:
            self._ray.kill(entry.agent)
            entry.agent = entry.task = entry.node = None

    def _ended(self, entry: _Entry, code: int | None) -> None:
        if code == REQUEUE_EXIT:
            entry.state = entry.then
        elif code is None:
            self._end(entry, "failed", None, f"gpucr was killed on node {entry.node}")
        else:
            self._end(entry, "done" if code == 0 else "failed", code, f"ended with {code}")

    def _end(self, entry: _Entry, state: State, code: int | None, reason: str) -> None:
        entry.state, entry.exit_code, entry.reason = state, code, reason
        entry.over.set()

    async def _withdraw(self, entry: _Entry) -> None:
        """End its start, if there is one: the agent is killed, and the job with it."""
        if entry.task is not None:
            entry.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await entry.task
            entry.task = None  # one that had not begun has not done so
