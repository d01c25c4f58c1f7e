"""Is an interposed job ever lost when gpucr, or its guard, is killed at a random moment? Run as root.

    python3 tests/hardware/killed_gpucr.py [--kills N] [--seed N] [--gib N] [--json FILE]

A training of `gpucr run` is suspended, resumed, dumped while it keeps running, dumped and restored, in turn. Each time
either gpucr or its guard gets SIGKILL at a random moment. Afterwards the job must be there, running or suspended, or
gone with its snapshot whole; then it is brought back, and must continue. Every line of it must be the one of a run that
nobody disturbed.

Needs torch and a GPU; with `--program simulated` the training is one of driver calls alone, for the simulated driver
(`gpucr sim env`). Every step ends after --limit seconds. Prints a table last. Exit code 1: a line differs, or the job
was lost.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from gpucr.linux import processes  # noqa: E402 - found where the checkout is
from tests.hardware.interposed import pace  # noqa: E402
from tests.hardware.interposed_suspend import (  # noqa: E402
    LINES_BETWEEN,
    PROGRAMS,
    Failed,
    Training,
    gpucr,
    undisturbed,
)

ACTIONS = ("suspend", "resume", "dump --leave-running", "dump", "restore")
FIRST_LENGTH_S = 1.5
"""The first kill of an action comes within this time; later ones within what an action that was not killed took."""

REFUSED, IN_TIME_AGAIN_S = 3, 0.2


class Storm:
    """The job, its snapshot, and what became of each kill."""

    def __init__(self, job: Training, folder: Path, seed: int, limit_s: float) -> None:
        self._job = job
        self._snapshot = folder / "snapshot"
        self._beside = folder / "beside"
        self._random = random.Random(seed)  # noqa: S311 - which moment
        self._limit_s = limit_s
        self._lengths = dict.fromkeys(ACTIONS, FIRST_LENGTH_S)
        self.told: list[tuple[str, str, str]] = []

    def hit(self, action: str) -> None:
        """Begin this action, kill, and bring the job back. Raises Failed."""
        if action in ("resume", "restore"):
            self._to_completion("suspend" if action == "resume" else "dump")
        victim = self._random.choice(("gpucr", "guard"))
        begin = time.monotonic()
        running = self._start(action)
        delay_s = self._random.uniform(0, self._lengths[action])
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(delay_s)
        killed = running.poll() is None and self._kill(running.pid, victim)
        _, stderr = running.communicate(timeout=self._limit_s)
        if running.returncode == 0:
            self._lengths[action] = time.monotonic() - begin
        elif not killed:
            raise Failed(f"gpucr {action} ended with {running.returncode} without being killed: {stderr[-2000:]}")
        end = self._bring_back()
        self.told.append((action, victim if killed else "none", end))
        print(
            f"  {action}, {victim} killed after {delay_s:.3f} s: {end}" if killed else f"  {action}: done", flush=True
        )
        self._job.wait_more(LINES_BETWEEN)

    def _command(self, action: str) -> list[str]:
        verb, *options = action.split()
        if verb == "restore":
            return [verb, str(self._snapshot)]
        if verb == "dump":
            to = self._beside if options else self._snapshot
            shutil.rmtree(to, ignore_errors=True)
            return [verb, *options, "--to", str(to), self._job.name]
        return [verb, self._job.name]

    def _start(self, action: str) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            [sys.executable, "-m", "gpucr", *self._command(action)], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def _to_completion(self, action: str) -> None:
        done = self._start(action)
        _, stderr = done.communicate(timeout=self._limit_s)
        if done.returncode != 0:
            raise Failed(f"gpucr {action} ended with {done.returncode}: {stderr[-2000:]}")

    @staticmethod
    def _kill(pid: int, victim: str) -> bool:
        """Whether there was something to kill."""
        pids = [pid]
        if victim == "guard":
            pids = [each.pid for each in processes.tree(pid) if "gpucr.undo.guard" in _words_of(each.pid)]
        for each in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
                return True
        return False

    def _bring_back(self) -> str:
        """Make it run, wherever it is; what it was before that. Raises Failed where it is nowhere."""
        until = time.monotonic() + self._limit_s
        while True:
            (found,) = (each for each in gpucr("jobs", "--all", "--json", limit_s=self._limit_s)["jobs"]
                        if each["name"] == self._job.name)  # fmt: skip
            state = found["state"]
            action = "resume" if state in ("running", "suspended") else "restore"
            done = self._start(action)
            _, stderr = done.communicate(timeout=self._limit_s)
            if done.returncode == 0:
                return str(state)
            if time.monotonic() > until:
                raise Failed(f"it is {state}, and gpucr {action} ended with {done.returncode}: {stderr[-2000:]}")
            time.sleep(IN_TIME_AGAIN_S)  # its guard still works, or a half-restored process is about to end


def _words_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def table(told: list[tuple[str, str, str]]) -> str:
    """A line for each action and victim: how often, and what the job was afterwards."""
    counted = collections.Counter(told)
    rows = [f"{'action':24}{'killed':10}{'times':>6}  the job was then"]
    for action, victim in dict.fromkeys((action, victim) for action, victim, _ in told):
        ends = {end: count for (a, v, end), count in counted.items() if (a, v) == (action, victim)}
        said = ", ".join(f"{end} {count}" for end, count in sorted(ends.items()))
        rows.append(f"{action:24}{victim:10}{sum(ends.values()):6}  {said}")
    return "\n".join(rows)


def main() -> int:
    """All kills. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gib", type=int, default=2, help="device memory of the training, beside the model")
    parser.add_argument("--program", choices=["torch", "simulated"], default="torch")
    parser.add_argument("--limit", type=float, default=60, help="seconds for each step")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    steps = (pace.AHEAD + LINES_BETWEEN) * (2 + options.kills)
    program = ["training.py", str(options.gib)] if options.program == "torch" else ["driver_calls.py"]
    command = [sys.executable, str(PROGRAMS / program[0]), *program[1:], str(steps), "0.01"]
    folder = Path(tempfile.mkdtemp(prefix="gpucr-killed-"))
    error, told, job = None, list[tuple[str, str, str]](), None
    try:
        expected = undisturbed(command, options.limit * 4)
        job = Training(f"killed-{os.getpid()}", folder, "--interpose", command, options.limit)
        job.wait_more(LINES_BETWEEN)
        storm = Storm(job, folder, options.seed, options.limit)
        told = storm.told
        for number in range(options.kills):
            storm.hit(ACTIONS[number % len(ACTIONS)])
        job.wait_end(len(expected))
        if job.lines() != expected:
            raise Failed(f"{len(job.lines())} lines of {len(expected)}, or other ones")
    except (Failed, subprocess.TimeoutExpired) as failed:
        error = str(failed)
    finally:
        if job is not None:
            job.kill()
        shutil.rmtree(folder, ignore_errors=True)
    print(table(told))
    print(f"FAILED: {error}" if error else f"all {len(expected)} lines as undisturbed")
    if options.json is not None:
        options.json.write_text(json.dumps({"told": told, "error": error}))
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
