"""Do programs under the interposer come back, value for value? Run as root on a machine with a GPU.

    python3 tests/hardware/interposer.py [--cycles N] [--gib N] [--only cuda|torch] [--json FILE]

Needs nvcc (for the CUDA program), torch (for the other), a C compiler and Python 3.10; no network. Each program runs
twice: undisturbed, without the interposer, and under it while its memory is taken away and given back N times. A cycle:

    close gate, driver lock, driver unlock, gate empty, export, drop, lock, checkpoint, restore, unlock, give back, open

Prints the time of every step, and says for each
program whether every line is the undisturbed one's. Exit code 1: one is not.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from msgspec import structs  # noqa: E402

from gpucr.interposer.build import compile_library  # noqa: E402
from gpucr.interposer.client import Agent  # noqa: E402
from gpucr.interposer.protocol import Refused  # noqa: E402
from tests.hardware.interposed import pace  # noqa: E402

PROGRAMS = Path(__file__).parent / "interposed"
STEP_LIMIT_S = 60.0
LOCK_MS = 100


class StepTookTooLong(Exception):
    """A step went past its limit."""


class Driver:
    """The six functions, by ctypes."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def act(self, action: str, pid: int, arguments: bytes = bytes(64)) -> int:
        function = getattr(self._library, f"cuCheckpointProcess{action}")
        result: int = function(pid, ctypes.create_string_buffer(arguments, 64))
        return result

    def must(self, action: str, pid: int, arguments: bytes = bytes(64)) -> None:
        result = self.act(action, pid, arguments)
        if result != 0:
            raise RuntimeError(f"{action} of {pid}: {result}")

    def lock(self, pid: int, timeout_ms: int) -> int:
        return self.act("Lock", pid, timeout_ms.to_bytes(4, "little") + bytes(60))


class Times:
    """How long each step took, over all cycles."""

    def __init__(self) -> None:
        self.steps: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, STEP_LIMIT_S)
        try:
            yield
        except StepTookTooLong:
            raise StepTookTooLong(f"{name} took longer than {STEP_LIMIT_S:.0f} s") from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.steps.setdefault(name, []).append(time.monotonic() - begin)

    def table(self) -> str:
        rows = [f"    {'step':14} {'median s':>9} {'longest s':>9}  times"]
        rows += [
            f"    {name:14} {statistics.median(taken):9.4f} {max(taken):9.4f}  {len(taken)}"
            for name, taken in self.steps.items()
        ]
        return "\n".join(rows)


class Program:
    """One run: its lines are collected as they come."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._may_step = Path(tempfile.mkstemp(prefix="gpucr-steps-")[1])
        pace.let_continue(self._may_step, pace.AHEAD)
        self.lines: list[str] = []
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the program)
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, pace.VARIABLE: str(self._may_step), **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()

    def wait_lines(self, count: int, limit_s: float) -> bool:
        """False: it ended, or is stuck."""
        until = time.monotonic() + limit_s
        pace.let_continue(self._may_step, count + pace.AHEAD)
        with self._changed:
            while len(self.lines) < count and time.monotonic() < until and self.process.poll() is None:
                self._changed.wait(0.2)
            return len(self.lines) >= count

    def finish(self, limit_s: float) -> int:
        """Let it do all of its steps."""
        pace.let_continue(self._may_step, pace.NO_LIMIT)
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join(10)
        self._may_step.unlink()
        return code

    def error_text(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-3000:]


def hold(driver: Driver, agent: Agent, times: Times) -> None:
    """Gate closed and the GPU drained, nobody inside. The gate opens between attempts."""
    until = time.monotonic() + STEP_LIMIT_S / 2
    attempts = 0
    while time.monotonic() < until:
        attempts += 1
        with times.step("close gate"):
            closed = agent.close_gate(0.05)
        with times.step("lock (drain)"):
            result = driver.lock(agent.pid, LOCK_MS)
        if result == 0:
            with times.step("unlock (drain)"):
                driver.must("Unlock", agent.pid)
            with times.step("gate empty"):
                closed = agent.close_gate(0.2)
            if closed.is_empty:
                return
        elif result != 600:
            raise RuntimeError(f"Lock: {result}")
        agent.open_gate()
        time.sleep(0.003)
    raise RuntimeError(f"not held in {attempts} attempts: last {closed}, lock {result}")


def keep_on_gpu(driver: Driver, agent: Agent, times: Times) -> None:
    """One cycle with the memory left where it is, in this process's hands."""
    begin = time.monotonic()
    hold(driver, agent, times)
    with times.step("export"):
        held = [each for batch in agent.export() for each in batch]
    with times.step("drop"):
        agent.drop()
    pid = agent.pid
    with times.step("lock"):
        driver.must("Lock", pid, (10000).to_bytes(4, "little") + bytes(60))
    with times.step("checkpoint"):
        driver.must("Checkpoint", pid)
    times.steps.setdefault("= frozen after", []).append(time.monotonic() - begin)
    begin = time.monotonic()
    with times.step("restore"):
        driver.must("Restore", pid)
    with times.step("unlock"):
        driver.must("Unlock", pid)
    with times.step("give back"):
        agent.give_back(held, renew=True)
    with times.step("open gate"):
        agent.open_gate()
    times.steps.setdefault("= thawed after", []).append(time.monotonic() - begin)


def undisturbed(command: Sequence[str], limit_s: float) -> list[str]:
    program = Program(command, {})
    code = program.finish(limit_s)
    if code != 0:
        raise RuntimeError(f"the undisturbed program ended with {code}: {program.error_text()}")
    return program.lines


def try_program(name: str, command: Sequence[str], library: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run, disturb, compare."""
    driver, times = Driver(), Times()
    print(f"{name}: {' '.join(command)}", flush=True)
    begin = time.monotonic()
    expected = undisturbed(command, options.limit)
    plain_s = time.monotonic() - begin
    program = Program(command, {"LD_PRELOAD": str(library)})
    outcome: dict[str, Any] = {"program": name, "lines": len(expected), "plain_s": plain_s}
    done = 0
    try:
        if not program.wait_lines(2, options.limit):
            raise RuntimeError(f"it did not start under the interposer: {program.error_text()}")
        with Agent(program.process.pid) as agent:
            status = agent.status()
            outcome["status"] = structs.asdict(status)
            print(
                f"    {status.blocks} blocks, {status.block_bytes / 2**30:.2f} GiB can leave; "
                f"{status.small} small ({status.small_bytes} bytes), {status.stuck} stuck, {status.pools} pools, "
                f"{status.pool_allocations} of pools, {status.arrays} arrays",
                flush=True,
            )
            for cycle in range(options.cycles):
                keep_on_gpu(driver, agent, times)
                done = cycle + 1
                after = agent.status()
                if after.stuck or after.away:
                    raise RuntimeError(f"after cycle {done}: {after}")
                if not program.wait_lines(len(program.lines) + 3, STEP_LIMIT_S):
                    if program.process.poll() == 0:
                        raise RuntimeError("it ended before all cycles were done: more steps are needed")
                    raise RuntimeError(f"it made no step after cycle {done}: {program.error_text()}")
    except (Exception, StepTookTooLong) as error:  # noqa: BLE001 (told, with the times that there are)
        outcome["error"] = f"{type(error).__name__}: {error}"
        if not isinstance(error, (RuntimeError, Refused)):
            traceback.print_exc()
    code = program.finish(options.limit if "error" not in outcome else 15)
    same = program.lines == expected
    first = next((i for i, (a, b) in enumerate(zip(program.lines, expected, strict=False)) if a != b), None)
    outcome |= {"cycles": done, "exit": code, "same": same, "times": times.steps}
    print(times.table())
    print(
        f"    {done} of {options.cycles} cycles; exit code {code}; "
        + (f"all {len(expected)} lines as undisturbed" if same else
           f"NOT AS UNDISTURBED: {len(program.lines)} of {len(expected)} lines, first other line: {first}")
    )  # fmt: skip
    if "error" in outcome:
        print(f"    FAILED: {outcome['error']}")
    if code != 0:
        print(f"    stderr: {program.error_text()}")
    sys.stdout.flush()
    return outcome


def on_alarm(_signal: int, _frame: Any) -> None:
    raise StepTookTooLong


def commands(options: argparse.Namespace, folder: Path) -> dict[str, Callable[[], list[str]]]:
    steps = str(options.steps or 20 + 12 * options.cycles)

    def cuda() -> list[str]:
        program = folder / "recurrence"
        subprocess.run(["nvcc", "-O2", "-o", str(program), str(PROGRAMS / "recurrence.cu")], check=True, timeout=300)
        return [str(program), str(int(options.gib * 1024)), steps, "50000"]

    def torch() -> list[str]:
        return [sys.executable, str(PROGRAMS / "training.py"), str(options.gib), steps, "0.05"]

    def simulated() -> list[str]:
        return [sys.executable, str(PROGRAMS / "driver_calls.py"), steps]

    return {"cuda": cuda, "torch": torch, "simulated": simulated}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--limit", type=float, default=180, help="seconds for one run of a program")
    parser.add_argument("--only", choices=["cuda", "torch", "simulated"], action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, on_alarm)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        library = compile_library(folder)
        ways = commands(options, folder)
        outcomes = [try_program(name, ways[name](), library, options) for name in options.only or ["cuda", "torch"]]
    if options.json is not None:
        options.json.write_text(json.dumps(outcomes, indent=1))
    return 0 if all(each["same"] and "error" not in each for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
