"""How long does a job stand still in a suspend, and how long does a resume take: interposed, captured, by the driver?

    python3 tests/hardware/interposed_suspend.py [--gib N] [--cycles N] [--ways WAY,...] [--json FILE]

Run it from the root of the repository, as root, on a machine with a GPU, torch and a C compiler. For each way the same
training is started with `gpucr run`, suspended and resumed N times with `--gpu-state WAY` while it trains, and run to
its end: every line must be the one of a run that nobody disturbed.

With `--program simulated` the training is one of driver calls alone, for the simulated driver (`gpucr sim env`).
Prints a table. Exit code 1: a line differs, or a step failed or took longer than --limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "interposed"
sys.path[:0] = [str(ROOT)]

from tests.hardware.interposed import pace  # noqa: E402 - found where the checkout is
from tests.lines import complete_lines  # noqa: E402 - found where the checkout is

WAYS = ("driver", "captured", "interposed")
STANDS_STILL_FROM = "lock"
LINES_BETWEEN = 3
_LOOK_EVERY_S = 0.01


class Failed(Exception):
    """A step did not do what it should, or not in time."""


@dataclass
class Outcome:
    """What became of one way. Times in seconds, one for each cycle; ``prepare``: while the job still ran."""

    way: str
    lines: int = 0
    cycles: int = 0
    prepare: list[float] = field(default_factory=list)
    standstill: list[float] = field(default_factory=list)
    suspend: list[float] = field(default_factory=list)
    resume: list[float] = field(default_factory=list)
    dump: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    move: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    error: str | None = None


def gpucr(*arguments: object, limit_s: float) -> dict[str, Any]:
    """Run ``gpucr ARGUMENTS`` and read its JSON. Raises Failed."""
    words = [str(argument) for argument in arguments]
    command = [sys.executable, "-m", "gpucr", *words]
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise Failed(f"gpucr {words[0]} took longer than {limit_s:.0f} s") from e
    if done.returncode != 0:
        raise Failed(f"gpucr {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


class Training:
    """One run as a job of gpucr's. Its lines are its log."""

    def __init__(self, name: str, folder: Path, option: str, command: Sequence[str], limit_s: float) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        self._limit_s = limit_s
        self._may_step = folder / f"{name}.steps"
        pace.let_continue(self._may_step, pace.AHEAD)
        os.environ[pace.VARIABLE] = str(self._may_step)
        gpucr("run", option, "--name", name, "--log", self._log, "--json", "--", *command, limit_s=limit_s)

    def lines(self) -> list[str]:
        """The complete ones."""
        return complete_lines(self._log)

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Until it is so. Raises Failed where that takes too long."""
        until = time.monotonic() + self._limit_s
        while not is_so():
            if time.monotonic() > until:
                raise Failed(f"{what} did not happen in {self._limit_s:.0f} s; last lines: {self.lines()[-5:]}")
            time.sleep(_LOOK_EVERY_S)

    def wait_more(self, more: int) -> None:
        """Until it has written so many lines more."""
        wanted = len(self.lines()) + more
        pace.let_continue(self._may_step, wanted + pace.AHEAD)
        self.wait(lambda: len(self.lines()) >= wanted or self.has_ended(), f"line {wanted}")
        if len(self.lines()) < wanted:
            raise Failed(f"it ended after {len(self.lines())} lines: {self.lines()[-5:]}")

    def has_ended(self) -> bool:
        """Whether the registry says so."""
        jobs = gpucr("jobs", "--all", "--json", limit_s=self._limit_s)["jobs"]
        return not any(job["name"] == self.name and job["state"] in ("running", "suspended") for job in jobs)

    def wait_end(self, count: int) -> None:
        """Until it has written all lines, and ended."""
        pace.let_continue(self._may_step, count)
        self.wait(lambda: len(self.lines()) >= count or self.has_ended(), f"line {count}")
        self.wait(self.has_ended, "its end")

    def kill(self) -> None:
        """End what is left of it."""
        from gpucr.errors import ProcessNotFound
        from gpucr.linux import processes

        jobs = gpucr("jobs", "--all", "--json", limit_s=self._limit_s)["jobs"]
        for job in jobs:
            if job["name"] == self.name and job["state"] in ("running", "suspended"):
                with contextlib.suppress(ProcessNotFound):
                    processes.kill_tree(job["pid"], including_root=True)


def split(phases: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """The seconds before the job stood still, and those from then on."""
    names = [phase["name"] for phase in phases]
    first = names.index(STANDS_STILL_FROM)
    return sum(phase["seconds"] for phase in phases[:first]), sum(phase["seconds"] for phase in phases[first:])


def cycle(training: Training, way: str, outcome: Outcome, limit_s: float) -> None:
    """Suspend and resume it once, and see that it trains."""
    begin = time.monotonic()
    said = gpucr("suspend", "--json", "--gpu-state", way, training.name, limit_s=limit_s)
    outcome.suspend.append(time.monotonic() - begin)
    states = {each["state"] for each in said["processes"]}
    if states != {"checkpointed"}:
        raise Failed(f"after the suspend its processes are {', '.join(map(str, states))}")
    prepare_s, standstill_s = split(said["phases"])
    outcome.prepare.append(prepare_s)
    outcome.standstill.append(standstill_s)
    before = len(training.lines())
    said_back = gpucr("resume", "--json", training.name, limit_s=limit_s)
    if len(training.lines()) < before:
        raise Failed("lines were lost")
    outcome.resume.append(sum(phase["seconds"] for phase in said_back["phases"]))
    outcome.phases.append({each["name"]: each["seconds"] for each in (*said["phases"], *said_back["phases"])})
    outcome.cycles += 1
    training.wait_more(LINES_BETWEEN)


def undisturbed(command: Sequence[str], limit_s: float) -> list[str]:
    """The lines of a run on its own, without gpucr."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode != 0:
        raise Failed(f"the undisturbed training ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout.splitlines()


def try_way(
    way: str, command: Sequence[str], expected: Sequence[str], folder: Path, cycles: int, limit_s: float
) -> Outcome:
    """Run it, disturb it, compare."""
    outcome = Outcome(way)
    training: Training | None = None
    try:
        option = "--interpose" if way == "interposed" else "--no-interpose"
        training = Training(f"suspend-{way}-{os.getpid()}", folder, option, command, limit_s)
        training.wait_more(LINES_BETWEEN)
        for _ in range(cycles):
            cycle(training, way, outcome, limit_s)
        training.wait_end(len(expected))
        lines = training.lines()
        outcome.lines = len(lines)
        if lines != list(expected):
            pairs = zip(lines, expected, strict=False)
            first = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(lines), len(expected)))
            raise Failed(f"line {first} of {len(expected)} is {lines[first : first + 1]}, and was {expected[first]!r}")
    except Failed as error:
        outcome.error = str(error)
    finally:
        if training is not None:
            training.kill()
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """A line for each way: medians, and how they compare with the driver's."""
    plain = next((each for each in outcomes if each.way == "driver" and each.cycles), None)
    rows = [f"{'way':12}{'cycles':>7}{'prepare s':>11}{'standstill s':>14}{'':>8}{'resume s':>10}{'':>8}  lines"]
    for each in outcomes:
        if not each.cycles:
            rows.append(f"{each.way:12}{0:7}")
            continue
        still, back = statistics.median(each.standstill), statistics.median(each.resume)
        times = ["", ""]
        if plain is not None and each is not plain:
            times = [f"{statistics.median(a) / b:.1f}x" for a, b in ((plain.standstill, still), (plain.resume, back))]
        same = "DIFFER" if each.error else f"{each.lines} as undisturbed"
        rows.append(
            f"{each.way:12}{each.cycles:7}{statistics.median(each.prepare):11.3f}{still:14.3f}{times[0]:>8}"
            f"{back:10.3f}{times[1]:>8}  {same}"
        )
    rows += [f"{each.way} FAILED: {each.error}" for each in outcomes if each.error]
    return "\n".join(rows)


def training_command(options: argparse.Namespace) -> list[str]:
    """The program, with steps enough for all cycles of the slowest way."""
    steps = options.steps or 2 * pace.AHEAD + options.cycles * (20 * LINES_BETWEEN)
    if options.program == "simulated":
        return [sys.executable, str(PROGRAMS / "driver_calls.py"), str(steps)]
    return [sys.executable, str(PROGRAMS / "training.py"), str(options.gib), str(steps), "0.05"]


def main() -> int:
    """Try every way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=24, help="device memory of the training, beside the model")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--ways", default=",".join(WAYS), help="which, and in which order")
    parser.add_argument("--program", choices=["torch", "simulated"], default="torch")
    parser.add_argument("--limit", type=float, default=180, help="seconds for each step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "src"))
    command = training_command(options)
    folder = Path(tempfile.mkdtemp(prefix="gpucr-interposed-suspend-"))
    try:
        expected = undisturbed(command, options.limit)
        outcomes = []
        for way in options.ways.split(","):
            outcomes.append(try_way(way, command, expected, folder, options.cycles, options.limit))
            print(table(outcomes[-1:]), flush=True)  # what there is, should the next one be cut off
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{options.program}, {options.gib} GiB, medians of {options.cycles} cycles")
    print(table(outcomes))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    return 1 if any(each.error for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
