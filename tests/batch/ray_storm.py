"""A storm: jobs on a Ray cluster of several nodes, which migrate, are preempted, and whose nodes are killed, at random.

``python3 -m tests.batch.ray_storm --jobs 50``. Each job must end with the right result, and leave no snapshot. On the
simulated driver. Needs root, CRIU and Ray.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from gpucr.batch.ray import Job, list_jobs
from gpucr.errors import InvalidRequest
from gpucr.sim import build as simulator
from tests import command
from tests.batch.ray_cluster import GPUS_PER_NODE, RayCluster
from tests.batch.system import RESULT, STEPS, last_start

NODES = 2
STEP_S = 0.2
_BETWEEN_S = (3.0, 8.0)
_OVER = ("done", "failed", "cancelled")


class Storm:
    """One cluster, its jobs, and the random events."""

    def __init__(self, cluster: RayCluster, jobs: list[Job], dice: random.Random) -> None:
        self.cluster = cluster
        self.jobs = jobs
        self.dice = dice
        self.events: Counter[str] = Counter()

    def strike(self) -> None:
        """Cause one event, on a node or a running job."""
        what = self.dice.choice(("node killed", "migrated", "preempted", "priority"))
        running = [status.id for status in list_jobs() if status.state == "running"]
        if what == "node killed":
            self.cluster.kill_node(self.dice.choice(list(self.cluster.nodes)))
            self.cluster.add_node()
        elif what == "priority":
            self.jobs.append(self._urgent())
        elif running:
            job = Job(self.dice.choice(running))
            try:
                job.migrate() if what == "migrated" else job.preempt()
            except InvalidRequest:  # it has just ended, or left
                return
        else:
            return
        self.events[what] += 1

    def go_on(self) -> None:
        """Continue preempted jobs."""
        for status in list_jobs():
            if status.state == "held":
                Job(status.id).resume()

    def _urgent(self) -> Job:
        return self.cluster.submit(
            gpus=GPUS_PER_NODE, priority=9, every_s=2, environment={"STEP_S": "0.05"}, grace_s=30
        )


def storm(count: int, seed: int, limit_s: float) -> dict[str, Any]:
    """Run the given number of jobs to the end. Returns what happened."""
    with tempfile.TemporaryDirectory(prefix="gpucr-ray-") as name, contextlib.ExitStack() as ends:
        folder = Path(name)
        for soname in ("libcuda.so.1", "libnvidia-ml.so.1"):
            ctypes.CDLL(str(simulator.build() / soname), mode=ctypes.RTLD_GLOBAL)
        os.environ.update(simulator.environment(state_dir=folder / "sim", fixed_cost_ms=1))
        cluster = RayCluster(folder, NODES)
        ends.callback(cluster.close)
        cluster.go_on_to_the_end()
        begin = time.monotonic()
        given = {"every_s": 2.0, "grace_s": 30.0, "environment": {"STEP_S": str(STEP_S)}}
        jobs = [cluster.submit(**given) for _ in range(count)]
        weather = Storm(cluster, jobs, random.Random(seed))  # noqa: S311
        _weather(weather, begin + limit_s)
        return _found(weather, time.monotonic() - begin)


def _weather(weather: Storm, end_s: float) -> None:
    next_s, told = time.monotonic() + _BETWEEN_S[0], -1
    while time.monotonic() < end_s:
        states = [status.state for status in list_jobs()]
        over = sum(state in _OVER for state in states)
        if over != told:
            click.echo(f"{over} of {len(states)} jobs have ended; {dict(weather.events)}", err=True)
            told = over
        if over == len(states):
            return
        if time.monotonic() >= next_s:
            weather.strike()
            next_s = time.monotonic() + weather.dice.uniform(*_BETWEEN_S)
        weather.go_on()
        time.sleep(0.3)


def _found(weather: Storm, seconds: float) -> dict[str, Any]:
    right, restores, wrong = 0, 0, []
    told = set()
    for job in weather.jobs:
        status, said = job.status(), job.logs()
        restores += said.count("gpucr batch: restored from")
        if "and its snapshot stays" in last_start(said):  # it ended while it was asked to leave
            told.add(job.id)
        results = [line for line in said.splitlines() if line.startswith("result")]
        steps = {line for line in said.splitlines() if line.startswith("step ")}
        if status.state == "done" and results[-1:] == [f"result {RESULT}"] and len(steps) == STEPS:
            right += 1
        else:
            wrong.append(f"{status}: {said[-1500:]}")
    left = {each["name"] for each in command.run_json("ls", weather.cluster.store)["snapshots"]}
    if left != told and not wrong:
        logs = "".join(Job(name).logs() for name in left ^ told)
        wrong.append(f"snapshots are left of {sorted(left)}, and said to stay of {sorted(told)}: {logs}")
    return {
        "jobs": len(weather.jobs),
        "right": right,
        "not ended": sum(job.status().state not in _OVER for job in weather.jobs),
        "wrong or lost": sum(job.status().state in _OVER for job in weather.jobs) - right,
        "restores": restores,
        "snapshots kept": len(left),
        **dict(sorted(weather.events.items())),
        "seconds": round(seconds, 1),
        "wrong": wrong,
    }


@click.command()
@click.option("--jobs", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--limit", "limit_s", type=click.FloatRange(min=1), default=3600.0, show_default=True, help="Seconds.")
@click.option("--json", "as_json", is_flag=True)
def main(*, jobs: int, seed: int, limit_s: float, as_json: bool) -> None:
    """Run jobs of `gpucr.batch.ray` on a cluster of several nodes; migrate, preempt and lose them at random."""
    found = storm(jobs, seed, limit_s)
    if as_json:
        click.echo(json.dumps(found))
    else:
        for name, value in found.items():
            click.echo(f"{name:16} {value}")
    raise SystemExit(1 if found["wrong"] else 0)


if __name__ == "__main__":
    main()
