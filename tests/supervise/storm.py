"""A storm: a supervised job whose processes, supervisor, guard and keeper are killed at random, again and again.

``python3 -m tests.supervise.storm --kills 500`` runs jobs one after the other until so many have been killed. Each must
end with the right result; each restore must be from the latest checkpoint that was told of; and every snapshot that was
told of must be there and whole in the end. On the simulated driver if there is no GPU. Needs root and CRIU.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

import gpucr
from gpucr.driver.gpus import list_gpus
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registered import registry
from gpucr.linux import processes
from gpucr.model import ProcessId
from gpucr.operations.end_job import end_processes
from gpucr.sim import build as simulator
from gpucr.supervise.folder import UNFINISHED, SupervisedFolder
from gpucr.supervise.settings import Supervision
from gpucr.supervise.start import end_supervisors, run_supervised, start_missing_supervisors

STEPS, MOST_RANKS = 150, 2
VICTIMS = ("rank", "root", "tree", "supervisor", "helper", "keeper")
_LIMIT_S = 120.0

JOB = """
import ctypes, os, sys, time
STEPS, RANKS = {steps}, {ranks}

def work(rank):
    cuda = ctypes.CDLL("libcuda.so.1")
    context, memory, value = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
    def call(name, *arguments):
        result = getattr(cuda, name)(*arguments)
        assert result == 0, (name, result)
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), rank)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(1 << 20))
    call("cuMemcpyHtoD_v2", memory, ctypes.byref(value), ctypes.c_size_t(8))
    out = open(f"rank{{rank}}", "w", buffering=1)
    for step in range(STEPS):  # the sum lives in device memory
        call("cuMemcpyDtoH_v2", ctypes.byref(value), memory, ctypes.c_size_t(8))
        value.value += step
        call("cuMemcpyHtoD_v2", memory, ctypes.byref(value), ctypes.c_size_t(8))
        print(value.value, file=out)
        time.sleep(0.02)

for rank in range(RANKS):
    if os.fork() == 0:
        work(rank)
        os._exit(0)
for _ in range(RANKS):
    if os.wait()[1] != 0:
        sys.exit(3)  # a launcher ends where a rank has; the others with it, or by the supervisor
"""


@dataclass
class Outcome:
    """What a storm did, and what was wrong with it."""

    jobs: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    restores: int = 0
    checkpoints: int = 0
    problems: list[str] = field(default_factory=list)


def one_job(folder: Path, kills: int, dice: random.Random, outcome: Outcome) -> None:
    """Run a job in ``folder`` to its end, and kill something so many times while it runs."""
    settings = Supervision(
        store=gpucr.init_store(folder / "store").backend.url,
        every_s=0.3,
        crashes=1000,
        max_restarts=1000,
        backoff_first_s=0.01,
        backoff_most_s=0.05,
    )
    command = [sys.executable, "-I", "-S", "-u", "-c", JOB.format(steps=STEPS, ranks=_ranks())]
    run_supervised(command, settings, name="train", cwd=folder)
    supervised = SupervisedFolder("train")
    end = time.monotonic() + _LIMIT_S
    left, is_early = kills, outcome.jobs % 5 == 4  # before there is a checkpoint, now and then
    while supervised.state().phase in UNFINISHED:
        if time.monotonic() > end:
            outcome.problems.append(f"it does not end: {_tail(supervised.log_path)}")
            break
        time.sleep(dice.uniform(0.0, 1.5))  # at any moment, that of a checkpoint or a restore among them
        may_begin = is_early or supervised.state().checkpoints.get("success")
        if left > 0 and may_begin and _kill(dice.choice(VICTIMS), dice, outcome.killed):
            left -= 1
        start_missing_supervisors()
    _check(folder, supervised, outcome)


def _ranks() -> int:
    """A GPU each."""
    return max(1, min(MOST_RANKS, len(list_gpus())))


def _kill(what: str, dice: random.Random, killed: Counter[str]) -> bool:
    """Kill it, if it is there."""
    victims = _victims(what)
    if victims and what in ("rank", "helper"):
        victims = [dice.choice(victims)]
    hit = [victim for victim in victims if processes.send_signal(victim, signal.SIGKILL)]
    killed[what] += bool(hit)
    return bool(hit)


def _victims(what: str) -> list[ProcessId]:
    with contextlib.suppress(gpucr.GpucrError):
        if what in ("supervisor", "helper"):  # a helper: the guard, CRIU, what a supervisor has below it
            supervisor = SupervisedFolder("train").running()
            if supervisor is None:
                return []
            tree = [process.id for process in processes.tree(supervisor.pid)]
            return tree[:1] if what == "supervisor" else tree[1:]
        record = _record()
        if record is None or not processes.is_alive(record.root):
            return []
        if what == "keeper":
            return [record.keeper] if record.keeper is not None else []
        tree = [process.id for process in processes.tree(record.pid)]
        return {"root": tree[:1], "rank": tree[1:], "tree": tree}[what]
    return []


def _record() -> JobRecord | None:
    found = registry().look("train")
    return None if found is None else found.record


def _check(folder: Path, supervised: SupervisedFolder, outcome: Outcome) -> None:
    outcome.jobs += 1
    state = supervised.state()
    if state.phase != "finished":
        outcome.problems.append(f"the job is {state.phase}: {_tail(supervised.log_path)}")
    expected = [sum(range(step + 1)) for step in range(STEPS)]
    for rank in range(_ranks()):
        found = [int(line) for line in (folder / f"rank{rank}").read_text().split()]
        if found != expected:
            outcome.problems.append(f"rank {rank} has {len(found)} steps, the last of them {found[-3:]}")
    stored = {each.id: number for number, each in enumerate(gpucr.list_snapshots(folder / "store").snapshots)}
    latest: str | None = None
    told: set[str] = set()
    for line in supervised.events_path.read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "checkpoint":
            latest = event["snapshot"]
            told.add(event["snapshot"])
        elif event["event"] == "restored":
            outcome.restores += 1
            if latest is not None and stored[event["snapshot"]] < stored[latest]:
                outcome.problems.append(f"restored from {event['snapshot']}, and {latest} was there")
            told.add(event["snapshot"])
    outcome.checkpoints += len(told)
    report = gpucr.verify_snapshots(folder / "store", deep=True)
    if report.problems or not told <= stored.keys():
        outcome.problems.append(f"lost {told - stored.keys()}, damaged {dict(report.problems)}")


def _tail(path: Path) -> str:
    return path.read_text()[-2000:] if path.exists() else "no log"


def clean_up() -> None:
    """End what is left of the job and its supervisor, and forget them."""
    end_supervisors(None, "leave", timeout_s=60)
    record = _record()
    if record is not None:
        end_processes(record)
    supervised = SupervisedFolder("train")
    supervised.remove()
    shutil.rmtree(supervised.path, ignore_errors=True)


def storm(kills: int, seed: int, per_job: int, say: Callable[[str], None]) -> Outcome:
    """Jobs, one after the other, until so many have been killed, or something was wrong."""
    dice = random.Random(seed)  # noqa: S311 - a storm that is reproducible
    outcome = Outcome()
    while sum(outcome.killed.values()) < kills and not outcome.problems:
        folder = Path(tempfile.mkdtemp(prefix="gpucr-storm-"))
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        try:
            one_job(folder, per_job, dice, outcome)
        finally:
            clean_up()
        if not outcome.problems:
            shutil.rmtree(folder, ignore_errors=True)
        if not outcome.checkpoints:
            outcome.problems.append("no checkpoint was ever taken: the storm proves nothing")
        say(f"{outcome.jobs} jobs, {sum(outcome.killed.values())} kills, {outcome.restores} restores")
    return outcome


@click.command()
@click.option("--kills", type=click.IntRange(min=1), default=500, show_default=True)
@click.option("--per-job", type=click.IntRange(min=1), default=10, show_default=True, help="Kills a job.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--real", is_flag=True, help="With the driver of this machine instead of the simulated one.")
@click.option("--json", "as_json", is_flag=True)
def main(*, kills: int, per_job: int, seed: int, real: bool, as_json: bool) -> None:
    """Kill supervised jobs at random, and check that nothing was lost."""
    if not real:
        os.environ.update(simulator.environment(state_dir=Path(tempfile.mkdtemp()), fixed_cost_ms=5))
        if "GPUCR_STORM_SIM" not in os.environ:  # the loader reads LD_LIBRARY_PATH when a process starts
            os.environ["GPUCR_STORM_SIM"] = "1"
            os.execv(sys.executable, [sys.executable, "-m", "tests.supervise.storm", *sys.argv[1:]])  # noqa: S606
    outcome = storm(kills, seed, per_job, lambda text: click.echo(text, err=True))
    found = {
        "jobs": outcome.jobs,
        "killed": dict(outcome.killed),
        "checkpoints": outcome.checkpoints,
        "restores": outcome.restores,
        "problems": outcome.problems,
    }
    if as_json:
        click.echo(json.dumps(found))
    else:
        for name, value in found.items():
            click.echo(f"{name:12} {value}")
    sys.exit(1 if outcome.problems else 0)


if __name__ == "__main__":
    main()
