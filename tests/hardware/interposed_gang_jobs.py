"""Do jobs whose processes share device memory come back through gpucr's commands, value for value? Run as root.

    python3 tests/hardware/interposed_gang_jobs.py [--cycles N] [--only cumem|ipc|peers|ranks] [--limit S] [--json FILE]

Each program runs twice: undisturbed, and as a job of `gpucr run --interpose` that is suspended and resumed N times with
`gpucr suspend --gpu-state interposed` and `gpucr resume` while it runs. Every line must be the one of the first run.

- cumem: two processes on one GPU, blocks sent by descriptor (driver calls alone, no torch)
- ipc: torch.multiprocessing with CUDA tensors that both processes change (legacy CUDA IPC)
- peers: one process on two GPUs, copies by peer access (measured first: `gpucr doctor --probe --only peer_access`)
- ranks: two DDP ranks on two GPUs with NCCL's defaults over NVLink (P2P/CUMEM, HOST_NUMA)

Needs a C compiler, and torch for all but `cumem`; `peers` and `ranks` are skipped on a machine with one GPU. Every step
ends after --limit seconds. Prints a table last. Exit code 1: a line differs, or a step failed.
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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.hardware.interposed_gangs import CASES, NEEDS_TWO_GPUS, PAUSE_S, gpu_count  # noqa: E402
from tests.hardware.interposed_suspend import (  # noqa: E402 - found where the checkout is
    LINES_BETWEEN,
    PROGRAMS,
    Failed,
    Outcome,
    Training,
    cycle,
    undisturbed,
)


def measure_peer_access(limit_s: float) -> None:
    """Whatever it finds: preflight goes by it. The doctor's exit code is about the machine."""
    command = [sys.executable, "-m", "gpucr", "doctor", "--probe", "--only", "peer_access"]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    try:
        subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.DEVNULL, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired as e:
        raise Failed(f"gpucr doctor took longer than {limit_s:.0f} s") from e


def try_case(name: str, folder: Path, cycles: int, steps: int, limit_s: float) -> Outcome:
    """Run it undisturbed and disturbed, and compare."""
    outcome = Outcome(name)
    job: Training | None = None
    command = [sys.executable, str(PROGRAMS / CASES[name]), str(steps), str(PAUSE_S)]
    print(f"{name}: {' '.join(command)}", flush=True)
    try:
        if name == "peers":
            measure_peer_access(limit_s)
        expected = undisturbed(command, limit_s)
        job = Training(f"gang-{name}-{os.getpid()}", folder, "--interpose", command, limit_s)
        job.wait_more(LINES_BETWEEN)
        for number in range(cycles):
            cycle(job, "interposed", outcome, limit_s)
            phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in outcome.phases[-1].items())
            print(f"    cycle {number + 1}: {phases}", flush=True)
        job.wait_end(len(expected))
        lines = job.lines()
        outcome.lines = len(lines)
        if lines != list(expected):
            raise Failed(_difference(lines, expected))
    except Failed as error:
        outcome.error = str(error)
        print(f"    FAILED: {error}", flush=True)
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
    rows = [f"{'case':8}{'cycles':>7}{'standstill s':>14}{'resume s':>10}  lines"]
    for each in outcomes:
        still = statistics.median(each.standstill) if each.standstill else float("nan")
        back = statistics.median(each.resume) if each.resume else float("nan")
        said = "FAILED" if each.error else f"all {each.lines} as undisturbed"
        rows.append(f"{each.way:8}{each.cycles:7}{still:14.3f}{back:10.3f}  {said}")
    return "\n".join(rows)


def main() -> int:
    """Every program. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0, help="of each program; none: enough for the cycles")
    parser.add_argument("--only", choices=list(CASES), action="append")
    parser.add_argument("--limit", type=float, default=180, help="seconds for each step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    gpus = gpu_count()
    folder = Path(tempfile.mkdtemp(prefix="gpucr-gang-jobs-"))
    try:
        for name in options.only or CASES:
            if name in NEEDS_TWO_GPUS and gpus < 2:
                print(f"{name}: SKIPPED, it needs two GPUs")
                continue
            steps = options.steps or 100 + 20 * options.cycles
            outcomes.append(try_case(name, folder, options.cycles, steps, options.limit))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    print(f"\n{options.cycles} cycles, medians")
    print(table(outcomes))
    return 1 if not outcomes or any(each.error for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
