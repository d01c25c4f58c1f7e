"""Do interposed jobs come back through gpucr's commands, value for value? Run as root.

    python3 tests/hardware/interposed_jobs.py [--cycles N] [--dumps N] [--moves N] [--only CASE] ...

Each program runs twice: undisturbed, and as a job of `gpucr run` that is disturbed while it runs: suspended and resumed
(--cycles) with `gpucr suspend --gpu-state interposed` (`auto` for cupy-async) and `gpucr resume`, dumped, ended and
restored (--dumps; every second time each rank gets the next GPU), and moved likewise (--moves; needs two GPUs). Every
line must be the one of the first run.

- cumem: two processes on one GPU, blocks sent by descriptor (driver calls alone, no torch)
- ipc: torch.multiprocessing with CUDA tensors that both processes change (legacy CUDA IPC)
- peers: one process on two GPUs, copies by peer access (measured first: `gpucr doctor --probe --only peer_access`)
- ranks: a DDP rank on each GPU with NCCL's defaults over NVLink (P2P/CUMEM, HOST_NUMA)
- fsdp, tensor, pipeline, experts: a rank on each GPU, as interposed/parallel.py tells (PARALLEL_RANKS: so many)
- compiled, transformer, jax, cupy, cupy-async, numba, server, hooks, profiled, loader, mpi: jobs on one GPU, as
  interposed/frameworks.py tells; the hooks of `hooks` must have been called once each in every cycle

Needs a C compiler, torch for all but `cumem`, and what the job is named after; `peers` and those with ranks are skipped
on a machine with one GPU. Every step ends after --limit seconds. Prints a table last. Exit code 1: a line differs, or a
step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.hardware.interposed import frameworks, pace  # noqa: E402 - found where the checkout is
from tests.hardware.interposed_gangs import CASES, NEEDS_TWO_GPUS, PAUSE_S, gpu_count  # noqa: E402
from tests.hardware.interposed_suspend import (  # noqa: E402 - found where the checkout is
    LINES_BETWEEN,
    PROGRAMS,
    Failed,
    Outcome,
    Training,
    cycle,
    gpucr,
    undisturbed,
)

PARALLEL = ("fsdp", "tensor", "pipeline", "experts")
JOBS = {**{name: [program] for name, program in CASES.items()},
        **{name: ["parallel.py", name] for name in PARALLEL},
        **{name: ["frameworks.py", name] for name in frameworks.JOBS}}  # fmt: skip
KEPT_BY_THE_DRIVER = {"cupy-async"}
"""The memory of the driver's own pools goes its way, which `auto` chooses."""


_LAST_LINES = 40
"""Of a failed program: four ranks that report an error take so many."""


def turned(gpus: int) -> tuple[str, str]:
    """Options: each GPU is the next one, and the last one the first."""
    return "--gpu-map", ",".join(f"{gpu}={(gpu + 1) % gpus}" for gpu in range(gpus))


def measure_peer_access(limit_s: float) -> None:
    """Any result counts: preflight goes by it. The doctor's exit code is about the machine."""
    command = [sys.executable, "-m", "gpucr", "doctor", "--probe", "--only", "peer_access"]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    try:
        subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired as e:
        raise Failed(f"gpucr doctor took longer than {limit_s:.0f} s") from e


@dataclass(frozen=True)
class Disturbances:
    """How often each thing is done to a job, and what a restore or a move may do with the GPUs."""

    cycles: int
    dumps: int
    moves: int
    way: str

    @property
    def of_all(self) -> int:
        """How often a job with one GPU is frozen."""
        return self.cycles + self.dumps

    def all_of(self, job: Training, outcome: Outcome, folder: Path, gpus: int, limit_s: float) -> None:
        """One after the other, with some lines between."""
        for number in range(self.cycles):
            cycle(job, self.way, outcome, limit_s)
            phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in outcome.phases[-1].items())
            print(f"    cycle {number + 1}: {phases}", flush=True)
        for number in range(self.dumps):
            swap = turned(gpus) if gpus > 1 and number % 2 else ()
            there_and_back(job, outcome, self.way, folder / f"{job.name}.snapshot", swap, limit_s)
        for _ in range(self.moves if gpus > 1 else 0):
            moved = gpucr("move", "--json", job.name, *turned(gpus), limit_s=limit_s)
            outcome.move.append(sum(phase["seconds"] for phase in moved["phases"]))
            print(f"    moved: {in_phases(moved)}", flush=True)
            job.wait_more(LINES_BETWEEN)


def there_and_back(
    job: Training, outcome: Outcome, way: str, snapshot: Path, swap: Sequence[str], limit_s: float
) -> None:
    """A dump that ends the job, and a restore of it."""
    begin = time.monotonic()
    dumped = gpucr("dump", "--json", "--gpu-state", way, job.name, "--to", snapshot, limit_s=limit_s)
    outcome.dump.append(time.monotonic() - begin)
    print(f"    dumped in {outcome.dump[-1]:.3f} s: {in_phases(dumped)}", flush=True)
    before, begin = len(job.lines()), time.monotonic()
    restored = gpucr("restore", "--json", snapshot, *swap, limit_s=limit_s)
    outcome.restore.append(time.monotonic() - begin)
    print(f"    restored {' '.join(swap)} in {outcome.restore[-1]:.3f} s: {in_phases(restored)}", flush=True)
    shutil.rmtree(snapshot)
    if len(job.lines()) < before:
        raise Failed("lines were lost")
    job.wait_more(LINES_BETWEEN)


def in_phases(said: dict[str, Any]) -> str:
    """Where the time went."""
    return ", ".join(f"{phase['name']} {phase['seconds']:.3f}" for phase in said["phases"])


def try_case(
    name: str, folder: Path, disturbances: Disturbances, gpus: int, steps: int, pause_s: float, limit_s: float
) -> Outcome:
    """Run it undisturbed and disturbed, and compare."""
    outcome = Outcome(name)
    job: Training | None = None
    program, *words = JOBS[name]
    command = [sys.executable, str(PROGRAMS / program), *words, str(steps), str(pause_s)]
    called = folder / f"{name}.called"
    print(f"{name}: {' '.join(command)}", flush=True)
    try:
        if name == "peers":
            measure_peer_access(limit_s)
        expected = undisturbed(command, limit_s)
        os.environ[frameworks.HOOKS_FILE] = str(called)
        job = Training(f"interposed-{name}-{os.getpid()}", folder, "--interpose", command, limit_s)
        job.wait_more(LINES_BETWEEN)
        disturbances.all_of(job, outcome, folder, gpus, limit_s)
        job.wait_end(len(expected))
        lines = job.lines()
        outcome.lines = len(lines)
        if lines != list(expected):
            raise Failed(_difference(lines, expected))
        if name == "hooks" and called.read_text().split() != ["before", "after"] * disturbances.of_all:
            raise Failed(f"its hooks were called so: {called.read_text().split()}")
    except (Failed, subprocess.TimeoutExpired) as error:
        outcome.error = str(error)
        print(f"    FAILED: {error}", flush=True)
        if job is not None:
            print("    its last lines:", *job.lines()[-_LAST_LINES:], sep="\n      ", flush=True)
    finally:
        if job is not None:
            job.kill()
    return outcome


def _difference(lines: Sequence[str], expected: Sequence[str]) -> str:
    pairs = zip(lines, expected, strict=False)
    first = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(lines), len(expected)))
    there, wanted = lines[first : first + 1], expected[first : first + 1]
    return f"{len(lines)} lines of {len(expected)}; line {first} is {there}, and was {wanted}"


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each program: medians in seconds."""
    columns = ("standstill", "resume", "dump", "restore", "move")
    rows = [f"{'case':12}{'cycles':>7}{'dumps':>6}{'moves':>6}" + "".join(f"{name + ' s':>14}" for name in columns)]
    for each in outcomes:
        medians = (
            f"{statistics.median(times):14.3f}" if times else f"{'':14}" for times in map(vars(each).get, columns)
        )
        said = "FAILED" if each.error else f"all {each.lines} lines as undisturbed"
        rows.append(f"{each.way:12}{each.cycles:7}{len(each.restore):6}{len(each.move):6}{''.join(medians)}  {said}")
    return "\n".join(rows)


def main() -> int:
    """Every program. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--dumps", type=int, default=2)
    parser.add_argument("--moves", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="of each program; none: enough for what is done to it")
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="seconds after each step (%(default)s)")
    parser.add_argument("--only", choices=list(JOBS), action="append")
    parser.add_argument("--limit", type=float, default=180, help="seconds for each step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    gpus = gpu_count()
    folder = Path(tempfile.mkdtemp(prefix="gpucr-interposed-jobs-"))
    try:
        for name in options.only or JOBS:
            if name in {*NEEDS_TWO_GPUS, *PARALLEL} and gpus < 2:
                print(f"{name}: SKIPPED, it needs two GPUs")
                continue
            way = "auto" if name in KEPT_BY_THE_DRIVER else "interposed"
            disturbances = Disturbances(options.cycles, options.dumps, options.moves, way)
            most = (pace.AHEAD + LINES_BETWEEN) * (2 + options.cycles + options.dumps + options.moves)
            steps = options.steps or most
            outcomes.append(try_case(name, folder, disturbances, gpus, steps, options.pause, options.limit))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    print("\nmedians")
    print(table(outcomes))
    return 1 if not outcomes or any(each.error for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
