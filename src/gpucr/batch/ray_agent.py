"""The actor that holds a job's GPUs on a node of a Ray cluster, and starts the job outside the raylet's tree."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpucr import extras
from gpucr.batch.place import Start
from gpucr.batch.snapshots import JobSnapshots
from gpucr.jobs.registered import registry
from gpucr.operations.end_job import end_processes
from gpucr.records import encode

_LOOK_EVERY_S = 0.2
_SAY_EVERY_S = 1.0
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class RayJob:
    """A submitted job. Durations in seconds."""

    id: str
    command: tuple[str, ...]
    store: str
    gpus: int
    cpus: float
    priority: int
    cwd: str
    environment: tuple[tuple[str, str], ...]
    grace_s: float
    every_s: float | None
    isolate: bool | None


class Agent:
    """One start of a job. Its process ends with the raylet, and the job with either of them.

    Ray kills a worker's children; the job is not one of them. On a dead machine nothing is left to end.
    """

    def __init__(self, job: RayJob, queue: Any) -> None:
        self._job = job
        self._queue = queue
        self._leaving = threading.Event()

    def node(self) -> str:
        """The id of the node where Ray has placed it."""
        found: str = extras.load("ray", "gpucr.batch.ray").get_runtime_context().get_node_id()
        return found

    def leave(self) -> None:
        """Dump and end the job."""
        self._leaving.set()

    def run(self, is_first: bool) -> int | None:
        """Run the job to its end, or until it has left. Returns its exit code; None: its process was killed."""
        output, output_end = os.pipe()
        told, told_end = os.pipe()
        watched = (os.pidfd_open(os.getpid()), os.pidfd_open(os.getppid()))
        try:
            try:
                self._start(is_first, output_end, told_end, watched)
            finally:
                for descriptor in (output_end, told_end, *watched):
                    os.close(descriptor)
            said = self._follow(output, told)
        finally:
            os.close(output)
            os.close(told)
        if "exit" in said:
            return int(said["exit"])
        self._end_remaining()
        return None

    def _start(self, is_first: bool, output: int, answers: int, watched: tuple[int, ...]) -> None:
        job = self._job
        start = Start(
            job.command,
            job.store,
            job.id,
            is_first,
            job.grace_s,
            job.every_s,
            job.isolate,
            answers,
            watched,
        )
        subprocess.run(
            [sys.executable, "-m", "gpucr.batch.place"],
            input=encode(start),
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(answers, *watched),
            cwd=job.cwd,
            env={**os.environ, **dict(job.environment)},
            check=True,
        )

    def _follow(self, output: int, told: int) -> dict[str, str]:
        """Pass on its output until it has ended. Returns its answers."""
        answers = b""
        last: Any = None
        next_s = 0.0
        open_ones = {output, told}
        while told in open_ones:
            ready = select.select(list(open_ones), [], [], _LOOK_EVERY_S)[0]
            for descriptor in ready:
                piece = os.read(descriptor, _PIECE_BYTES)
                if not piece:
                    open_ones.discard(descriptor)
                elif descriptor == told:
                    answers += piece
                else:
                    last = self._queue.append.remote(self._job.id, piece)
            if self._leaving.is_set() and time.monotonic() >= next_s and b"\n" in answers:
                next_s = time.monotonic() + _SAY_EVERY_S  # the first signal may have come before it listened
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(_answers(answers)["pid"]), signal.SIGUSR1)
        while output in open_ones and select.select([output], [], [], 0)[0]:
            if not (piece := os.read(output, _PIECE_BYTES)):
                break
            last = self._queue.append.remote(self._job.id, piece)
        if last is not None:
            extras.load("ray", "gpucr.batch.ray").get(last)  # complete the log before the result is known
        return _answers(answers)

    def _end_remaining(self) -> None:
        """The job ends with what ran it; once this returns it has ended. It may not have begun."""
        found = registry().look(JobSnapshots(self._job.store, self._job.id, None).job_name)
        if found is not None and found.record is not None:
            end_processes(found.record)


def agent_of(job: RayJob, queue: Any, avoid: str | None) -> Any:
    """An actor for one start of the job, which waits until Ray has GPUs for it, on another node than ``avoid``."""
    ray = extras.load("ray", "gpucr.batch.ray")
    options: dict[str, Any] = {"num_gpus": job.gpus, "num_cpus": job.cpus, "max_concurrency": 4, "max_restarts": 0}
    if avoid is not None:
        options["label_selector"] = {"ray.io/node-id": f"!in({avoid})"}
    create: Callable[..., Any] = ray.remote(Agent).options(**options).remote
    return create(job, queue)


def _answers(text: bytes) -> dict[str, str]:
    """What its process has said, in whole lines."""
    lines = text[: text.rfind(b"\n") + 1].decode(errors="replace").split("\n")
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}
