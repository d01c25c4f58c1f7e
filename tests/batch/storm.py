"""A storm: jobs on a Slurm of two nodes, which are preempted and requeued, and whose nodes lose their power, at random.

``python3 -m tests.batch.storm --jobs 100``. Each job must end with the right result, and leave no snapshot. On the
simulated driver. Needs root, CRIU and Slurm (installed, or fetched).
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import click

from tests.batch.slurm import GPUS_PER_NODE, NODES, Slurm, find_slurm
from tests.batch.slurm_jobs import Jobs
from tests.batch.system import RESULT, STEPS, last_start

STEP_S = 0.2
_SITS = "#!/bin/sh\nexec sleep 2\n"
_BETWEEN_S = (3.0, 8.0)
_LIMIT_S = 3600.0


@dataclass
class Outcome:
    """What a storm did, and what was wrong with it."""

    jobs: int = 0
    right: int = 0
    restores: int = 0
    kept: int = 0
    seconds: float = 0.0
    events: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Storm:
    """One cluster, its jobs, and the random events."""

    def __init__(self, slurm: Slurm, folder: Path, dice: random.Random) -> None:
        self.slurm = slurm
        self.jobs = Jobs(slurm, folder)
        self.jobs.go_on_to_the_end()
        self.dice = dice
        self.events: Counter[str] = Counter()
        self._down: dict[str, float] = {}

    def strike(self, ids: list[str]) -> None:
        """Cause one event, on a running job or a node."""
        running = [job_id for job_id in ids if self.states().get(job_id) == "RUNNING"]
        what = self.dice.choice(("preemption", "signal", "requeue", "node"))
        if what == "preemption":
            options = ("--partition=high", f"--nodelist={self.dice.choice(NODES)}", f"--gres=gpu:{GPUS_PER_NODE}")
            self.slurm.submit(_SITS, *options, "--output=/dev/null")
        elif what == "node" and not self._down:
            name = self.dice.choice(NODES)
            self.slurm.fail_node(name)
            self._down[name] = time.monotonic() + 3
        elif what == "signal" and running:
            self._try("scancel", "--batch", "--signal=USR1", self.dice.choice(running))
        elif what == "requeue" and running:
            self._try("scontrol", "requeue", self.dice.choice(running))
        else:
            return
        self.events[what] += 1

    def tend(self, ids: list[str]) -> None:
        """Bring nodes back, and start requeued jobs without the wait of 120 s."""
        for name, when in list(self._down.items()):
            if time.monotonic() > when:
                self.slurm.repair_node(name)
                del self._down[name]
        waiting = self.slurm.run("squeue", "--noheader", "--states=PENDING", "--format=%A %S").splitlines()
        soon = datetime.now() + timedelta(seconds=10)
        for job_id, _, start in (line.partition(" ") for line in waiting):
            if job_id in ids and start[:1].isdecimal() and datetime.fromisoformat(start) > soon:
                self._try("scontrol", "update", f"JobId={job_id}", "StartTime=now+2")

    def states(self) -> dict[str, str]:
        """The states of all jobs that the controller knows."""
        lines = self.slurm.run("squeue", "--noheader", "--states=all", "--format=%A %T").splitlines()
        return dict(line.split() for line in lines)

    def _try(self, *words: str) -> None:
        with contextlib.suppress(AssertionError):  # it has just ended, or been requeued
            self.slurm.run(*words)


def storm(count: int, seed: int, say: Callable[[str], None]) -> Outcome:
    """Run the given number of jobs to the end."""
    outcome = Outcome(jobs=count)
    with tempfile.TemporaryDirectory(prefix="gpucr-storm-") as name:
        folder = Path(name)
        for part in ("slurm", "jobs"):
            (folder / part).mkdir()
        with contextlib.closing(Slurm(folder / "slurm", find_slurm())) as slurm:
            begin = time.monotonic()
            weather = Storm(slurm, folder / "jobs", random.Random(seed))  # noqa: S311
            signals = ("--signal=B:USR1@30",)
            ids = [weather.jobs.submit(*signals, options="--every 2s", step_s=STEP_S) for _ in range(count)]
            _weather(weather, ids, outcome, say)
            outcome.seconds = time.monotonic() - begin
            outcome.events = weather.events
            _check(weather, ids, outcome)
            weather.jobs.close()
    return outcome


def _weather(weather: Storm, ids: list[str], outcome: Outcome, say: Callable[[str], None]) -> None:
    end, next_s, told = time.monotonic() + _LIMIT_S, 0.0, -1
    while True:
        states = weather.states()
        over = [job_id for job_id in ids if states.get(job_id) in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")]
        if len(over) != told:
            say(f"{len(over)} of {len(ids)} jobs have ended; {dict(weather.events)}")
            told = len(over)
        if len(over) == len(ids):
            return
        if time.monotonic() > end:
            outcome.wrong.append(f"after {_LIMIT_S:.0f} s {len(ids) - len(over)} jobs have not ended")
            return
        if time.monotonic() >= next_s:
            weather.strike(ids)
            next_s = time.monotonic() + weather.dice.uniform(*_BETWEEN_S)
        weather.tend(ids)
        time.sleep(0.3)


def _check(weather: Storm, ids: list[str], outcome: Outcome) -> None:
    states = weather.states()
    for job_id in ids:
        said = weather.jobs.output(job_id)
        outcome.restores += said.count("gpucr batch: restored from")
        results = [line for line in said.splitlines() if line.startswith("result")]
        steps = {line for line in said.splitlines() if line.startswith("step ")}
        if states.get(job_id) == "COMPLETED" and results[-1:] == [f"result {RESULT}"] and len(steps) == STEPS:
            outcome.right += 1
        else:
            outcome.wrong.append(f"job {job_id}: {states.get(job_id)}, {said[-1500:]}")
    left = {each["name"] for each in weather.jobs.snapshots()}
    # One that ended with 0 just after a signal may have obeyed it: gpucr keeps its snapshot, and says so. Slurm may
    # have started it again nevertheless: its node was lost at that moment, or it was requeued.
    told = {f"slurm-{job_id}" for job_id in ids if "and its snapshot stays" in last_start(weather.jobs.output(job_id))}
    outcome.kept = len(left)
    if left != told:
        outcome.wrong.append(f"snapshots are left of {sorted(left)}, and said to stay of {sorted(told)}")


@click.command()
@click.option("--jobs", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, jobs: int, seed: int, as_json: bool) -> None:
    """Run jobs of `gpucr batch` on a Slurm of two nodes, and preempt, requeue and lose them at random."""
    outcome = storm(jobs, seed, lambda text: click.echo(text, err=True))
    # Undisturbed, so many jobs run at once.
    ideal_s = STEPS * STEP_S * -(-jobs // (len(NODES) * GPUS_PER_NODE))
    found = {
        "jobs": outcome.jobs,
        "right": outcome.right,
        "restores": outcome.restores,
        "snapshots kept": outcome.kept,
        **{f"by {what}": number for what, number in sorted(outcome.events.items())},
        "seconds": round(outcome.seconds, 1),
        "seconds of work": round(ideal_s, 1),
        "wrong": outcome.wrong,
    }
    if as_json:
        click.echo(json.dumps(found))
    else:
        for name, value in found.items():
            click.echo(f"{name:16} {value}")
    raise SystemExit(1 if outcome.wrong else 0)


if __name__ == "__main__":
    main()
