"""Do jobs that fill their GPU survive everything, again and again, value for value? Run as root.

    python3 tests/hardware/full_gpu.py [--only CASE] ... [--fill SHARE] ... [--steps N] [--seed N] [--limit SECONDS]

Each program of interposed/full.py runs undisturbed, and as a job of `gpucr run` to which N things are done while it
runs, in an order that the seed gives: a dump that leaves it running (into a folder, if that fits, and into a store),
suspend and resume, dump and restore, freeze and thaw, a move (on two GPUs), and an operation whose gpucr or guard is
killed. Every line must be the one of the undisturbed run; each step adds up all of the program's memory.

``pool`` goes the driver's way, which takes long. ``ranks`` needs two GPUs. --do NAME,NAME does these things, in this
order instead. Prints a table. Exit code 1: a line differs, or something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.hardware.interposed import pace  # noqa: E402 - found where the checkout is
from tests.hardware.interposed_gangs import gpu_count  # noqa: E402
from tests.hardware.interposed_jobs import turned  # noqa: E402
from tests.hardware.interposed_suspend import (  # noqa: E402
    PROGRAMS,
    Failed,
    Training,
    gpucr,
    split,
    undisturbed,
)
from tests.hardware.killed_gpucr import Storm  # noqa: E402

CASES = ("chunks", "one", "small", "segments", "pool", "jax", "ranks")
BY_THE_DRIVER = {"pool"}
LINES_BETWEEN = 2
FOLDER_AT_MOST = 40 << 30
"""Larger jobs are dumped into stores, which have equal pieces once: the machine's disk is small."""

FREEZE = """
import sys, time, gpucr
begin = time.monotonic()
with gpucr.freeze(sys.argv[1]):
    pass
print(time.monotonic() - begin)
"""


@dataclass
class Outcome:
    """What became of one case. Seconds, one for each time."""

    case: str
    fill: float
    held_mib: int = 0
    lines: int = 0
    done: list[str] = field(default_factory=list)
    still: dict[str, list[float]] = field(default_factory=dict)
    error: str | None = None


class Doing:
    """What can be done to a job."""

    def __init__(self, job: Training, folder: Path, outcome: Outcome, way: str, seed: int, limit_s: float) -> None:
        self.job = job
        self.folder = folder
        self.way = ("--gpu-state", way)
        self._outcome = outcome
        self._limit_s = limit_s
        self._storm = Storm(job, folder, seed, limit_s)
        self._chance = random.Random(seed)  # noqa: S311
        gpucr("store", "init", folder / "store", "--json", limit_s=limit_s)

    def _note(self, name: str, seconds: float) -> None:
        self._outcome.still.setdefault(name, []).append(seconds)

    @property
    def _to(self) -> Path:
        small = self._outcome.held_mib << 20 <= FOLDER_AT_MOST
        return self.folder / "left" if small else self.folder / "store"

    def leave(self) -> None:
        """A dump that leaves it running, into a folder if that fits."""
        said = gpucr(
            "dump", "--json", *self.way, "--leave-running", self.job.name, "--to", self._to, limit_s=self._limit_s
        )
        self._note("leave", said["downtime_s"])
        shutil.rmtree(self.folder / "left", ignore_errors=True)

    def leave_in_store(self) -> None:
        """Likewise, into a store."""
        said = gpucr("dump", "--json", *self.way, "--leave-running", self.job.name, "--to", self.folder / "store",
                     limit_s=self._limit_s)  # fmt: skip
        self._note("store", said["downtime_s"])

    def suspend(self) -> None:
        """And resume."""
        said = gpucr("suspend", "--json", *self.way, self.job.name, limit_s=self._limit_s)
        self._note("suspend", split(said["phases"])[1])
        begin = time.monotonic()
        gpucr("resume", "--json", self.job.name, limit_s=self._limit_s)
        self._note("resume", time.monotonic() - begin)

    def dump(self) -> None:
        """Dump, end, restore."""
        begin = time.monotonic()
        said = gpucr("dump", "--json", *self.way, self.job.name, "--to", self._to, limit_s=self._limit_s)
        middle = time.monotonic()
        self._note("dump", middle - begin)
        gpucr("restore", "--json", said["snapshot"], limit_s=self._limit_s)
        self._note("restore", time.monotonic() - middle)
        shutil.rmtree(self.folder / "left", ignore_errors=True)

    def rehearse(self) -> None:
        """A dump that leaves it running, and a rehearsal of that beside it."""
        said = gpucr("dump", "--json", *self.way, "--leave-running", self.job.name, "--to", self._to,
                     limit_s=self._limit_s)  # fmt: skip
        begin = time.monotonic()
        held = gpucr("verify", "--json", "--rehearse", said["snapshot"], limit_s=self._limit_s)
        self._note("rehearse", time.monotonic() - begin)
        print(f"    rehearsed {held['checked_bytes'] >> 20} MiB, left out: {held['left_out'] or 'nothing'}", flush=True)
        shutil.rmtree(self.folder / "left", ignore_errors=True)

    def dump_rehearsed(self) -> None:
        """Dump, rehearse before it is ended, restore."""
        said = gpucr("dump", "--json", "--rehearse", *self.way, self.job.name, "--to", self._to, limit_s=self._limit_s)
        begin = time.monotonic()
        gpucr("restore", "--json", said["snapshot"], limit_s=self._limit_s)
        self._note("restore", time.monotonic() - begin)
        shutil.rmtree(self.folder / "left", ignore_errors=True)

    def freeze(self) -> None:
        """And thaw, with the memory left on the GPU."""
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        done = subprocess.run([sys.executable, "-c", FREEZE, self.job.name], env={**os.environ, "PYTHONPATH": path},
                              capture_output=True, text=True, timeout=self._limit_s, check=False)  # fmt: skip
        if done.returncode != 0:
            raise Failed(f"freeze: {done.stderr[-2000:]}")
        self._note("freeze", float(done.stdout))

    def move(self) -> None:
        """To the next GPU, or each rank to the next one."""
        said = gpucr("move", "--json", self.job.name, *turned(gpu_count()), limit_s=self._limit_s)
        self._note("move", split(said["phases"])[1])

    def killed(self) -> None:
        """gpucr or its guard is killed in an operation."""
        fits = ["dump --leave-running"] if self._to.name == "left" else []
        self._storm.hit(self._chance.choice(("suspend", "resume", *fits)))


def random_things(doing: Doing, count: int, seed: int, gpus: int) -> list[tuple[str, Callable[[], None]]]:
    """Which things to do, in order."""
    chance = random.Random(seed)  # noqa: S311
    names = ["leave", "leave_in_store", "suspend", "dump", "freeze", "killed", *(["move"] if gpus > 1 else [])]
    if doing.way[1] != "auto":
        chosen = [chance.choice(names) for _ in range(count)]
    else:
        chosen = [chance.choice(["suspend", "leave_in_store"]) for _ in range(min(count, 3))]
    return [(name, getattr(doing, name)) for name in chosen]


def held_mib() -> int:
    """Device memory in use on the first GPU, whoever has it."""
    done = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"],
                          capture_output=True, text=True, check=False)  # fmt: skip
    return int(done.stdout) if done.returncode == 0 else 0


def try_case(case: str, fill: float, options: argparse.Namespace, gpus: int) -> Outcome:
    """Run it undisturbed and disturbed, and compare."""
    outcome = Outcome(case, fill)
    os.environ["FULL_FILL"] = str(fill)
    folder = Path(tempfile.mkdtemp(prefix="gpucr-full-", dir=options.folder))
    asked = options.do.split(",") if options.do else []
    count = len(asked) or options.steps
    lines = (count + 2) * (pace.AHEAD + LINES_BETWEEN)
    command = [sys.executable, str(PROGRAMS / "full.py"), case, str(lines)]
    job: Training | None = None
    print(f"{case} {fill}", flush=True)
    try:
        expected = undisturbed(command, options.limit)
        job = Training(
            f"full-{case}-{int(fill * 100)}-{os.getpid()}", folder, "--interpose", [*command, "0.02"], options.limit
        )
        job.wait_more(LINES_BETWEEN)
        outcome.held_mib = held_mib()
        doing = Doing(
            job, folder, outcome, "auto" if case in BY_THE_DRIVER else "interposed", options.seed, options.limit
        )
        things = [(name, getattr(doing, name)) for name in asked] or random_things(doing, count, options.seed, gpus)
        for name, thing in things:
            begin = time.monotonic()
            thing()
            outcome.done.append(name)
            job.wait_more(LINES_BETWEEN)
            print(f"    {name} {time.monotonic() - begin:.1f} s", flush=True)
        compare(job.lines(), expected)
        outcome.lines = len(job.lines())
    except (Failed, subprocess.TimeoutExpired) as error:
        outcome.error = str(error)
        print(f"    FAILED: {error}", flush=True)
    finally:
        if job is not None:
            job.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def compare(lines: Sequence[str], expected: Sequence[str]) -> None:
    """Raise Failed unless these are its first lines."""
    for number, line in enumerate(lines):
        if number >= len(expected) or line != expected[number]:
            raise Failed(f"line {number} is {line[:200]}, and was {expected[number : number + 1]}"[:600])


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each: what was done, and the median seconds."""
    rows = []
    for each in outcomes:
        times = ", ".join(f"{name} {statistics.median(seconds):.2f}" for name, seconds in sorted(each.still.items()))
        end = f"FAILED after {len(each.done)}: {each.error[:300]}" if each.error else f"all {each.lines} lines the same"
        rows.append(f"{each.case:9} {each.fill:.2f} {each.held_mib:6} MiB  {len(each.done):2} done  {end}; {times}")
    return "\n".join(rows)


def main() -> int:
    """Every case at every fill. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--fill", type=float, action="append", help="share of the GPU (0.6, 0.9, 0.98)")
    parser.add_argument("--gib", type=float, help="size of the job, instead of a share of the GPU")
    parser.add_argument("--steps", type=int, default=20, help="things that are done to each job")
    parser.add_argument(
        "--do",
        help="these, in this order: leave, leave_in_store, suspend, dump, freeze, move, killed, "
        "rehearse, dump_rehearsed",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=120, help="seconds for each step")
    parser.add_argument("--folder", default="/var/tmp")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the job must not stay
    gpus, outcomes = gpu_count(), list[Outcome]()
    if options.gib is not None:
        os.environ["FULL_GIB"], options.fill = str(options.gib), [options.gib / 80]
    for fill in options.fill or [0.6, 0.9, 0.98]:
        for case in options.only or CASES:
            if case == "ranks" and gpus < 2:
                print("ranks: SKIPPED, it needs two GPUs")
                continue
            outcomes.append(try_case(case, fill, options, gpus))
            print(table(outcomes[-1:]), flush=True)
    print("\n" + table(outcomes))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    return 1 if any(each.error for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
