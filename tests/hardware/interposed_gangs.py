"""Do programs whose processes share device memory come back under the interposer, value for value? Run as root.

    python3 tests/hardware/interposed_gangs.py [--cycles N] [--only cumem|ipc|peers|ranks] [--json FILE]

Needs a C compiler, and torch for all but `cumem`; `peers` and `ranks` are skipped on a machine with one GPU. Each
program runs twice: undisturbed, without the interposer, and under it while all of its processes are frozen and thawed N
times. A cycle takes all of them together through each step:

    gates closed and driver locked (as one: where one rank is not held, all continue for a moment), driver unlocked,
    gates empty, whose memory is whose, export, drop, lock, checkpoint, restore, unlock, give back, share again, open

Prints the time of every step, and says for each program whether every line is the undisturbed one's. Exit code 1: one
is not.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from gpucr.interposer import owners  # noqa: E402 - found where the checkout is
from gpucr.interposer.build import compile_library  # noqa: E402
from gpucr.interposer.client import Agent, Held  # noqa: E402
from gpucr.linux import processes  # noqa: E402
from tests.hardware.interposer import (  # noqa: E402
    LOCK_MS,
    PROGRAMS,
    STEP_LIMIT_S,
    Driver,
    Program,
    StepTookTooLong,
    Times,
    on_alarm,
    undisturbed,
)

CASES = {"cumem": "shared_blocks.py", "ipc": "shared_tensors.py", "peers": "peer_copies.py", "ranks": "ranks.py"}
NEEDS_TWO_GPUS = {"peers", "ranks"}
PAUSE_S = 0.05
Gang = Sequence[Agent]


def gpu_count() -> int:
    """As the driver tells."""
    library, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    return count.value if library.cuInit(0) == 0 and library.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def lock_all(driver: Driver, gang: Gang) -> int:
    """0: all are locked; else the first other result, and none is."""
    locked: list[Agent] = []
    for agent in gang:
        result = driver.lock(agent.pid, LOCK_MS)
        if result != 0:
            for each in locked:
                driver.must("Unlock", each.pid)
            return result
        locked.append(agent)
    return 0


def hold(driver: Driver, gang: Gang, times: Times) -> int:
    """Gates closed, GPUs drained, nobody inside. How many attempts it took."""
    until, attempts, result = time.monotonic() + STEP_LIMIT_S / 2, 0, 0
    while time.monotonic() < until:
        attempts += 1
        with times.step("close gates"):
            for agent in gang:
                agent.close_gate(0.02)
        with times.step("lock (drain)"):
            result = lock_all(driver, gang)
        if result == 0:
            for agent in gang:
                driver.must("Unlock", agent.pid)
            with times.step("gates empty"):
                closed = [agent.close_gate(0.2) for agent in gang]
            if all(each.is_empty for each in closed):
                return attempts
        elif result != 600:
            raise RuntimeError(f"Lock: {result}")
        for agent in gang:
            agent.open_gate()
        time.sleep(0.003 * min(attempts, 30))
    raise RuntimeError(f"not held in {attempts} attempts: last lock {result}")


def freeze(driver: Driver, gang: Gang, times: Times) -> tuple[owners.Sharing, dict[int, list[Held]]]:
    """RUNNING → CHECKPOINTED, with the memory in this process's hands."""
    begin = time.monotonic()
    attempts = hold(driver, gang, times)
    times.steps.setdefault("(attempts)", []).append(attempts)
    with times.step("whose is what"):
        shared = owners.find({agent.pid: agent.blocks() for agent in gang})
    if shared.unowned:
        raise RuntimeError(f"{len(shared.unowned)} imported blocks have no owner: {shared.unowned[0]}")
    with times.step("export"):
        held = {agent.pid: [each for batch in agent.export() for each in batch] for agent in gang}
    with times.step("drop"):
        for agent in gang:
            agent.drop(imported_too=True)
    with times.step("lock"):
        for agent in gang:
            driver.must("Lock", agent.pid, (10000).to_bytes(4, "little") + bytes(60))
    with times.step("checkpoint"):
        for agent in gang:
            driver.must("Checkpoint", agent.pid)
    times.steps.setdefault("= frozen after", []).append(time.monotonic() - begin)
    return shared, held


def thaw(driver: Driver, gang: Gang, times: Times, shared: owners.Sharing, held: dict[int, list[Held]]) -> None:
    """CHECKPOINTED → RUNNING: first what each made, then what others import of it."""
    begin = time.monotonic()
    with times.step("restore"):
        for agent in gang:
            driver.must("Restore", agent.pid)
    with times.step("unlock"):
        for agent in gang:
            driver.must("Unlock", agent.pid)
    with times.step("give back"):
        for agent in gang:
            agent.give_back(held[agent.pid], renew=True)
    with times.step("share again"):
        agents = {agent.pid: agent for agent in gang}
        fresh = {
            (agent.pid, each.block.index): each
            for agent in gang
            for batch in agent.export(shared_only=True)
            for each in batch
        }
        for pid, agent in agents.items():
            mine = [(place, owner) for place, owner in shared.owned.items() if place.pid == pid]
            copies = [
                Held(place.block, os.dup(fresh[owner.pid, owner.block.index].descriptor)) for place, owner in mine
            ]
            agent.give_back(copies, renew=False)
        for each in fresh.values():
            each.close()
    with times.step("open gates"):
        for agent in gang:
            agent.open_gate()
    times.steps.setdefault("= thawed after", []).append(time.monotonic() - begin)


def connect(stack: contextlib.ExitStack, pid: int) -> list[Agent]:
    """Those of the tree's processes that have an agent."""
    gang = []
    for process in processes.tree(pid):
        with contextlib.suppress(OSError):
            gang.append(stack.enter_context(Agent(process.pid)))
    return gang


def disturb(program: Program, options: argparse.Namespace, times: Times, outcome: dict[str, Any]) -> None:
    """All cycles."""
    driver = Driver()
    with contextlib.ExitStack() as stack:
        gang = connect(stack, program.process.pid)
        gang = [agent for agent in gang if agent.status().blocks or agent.status().imported]
        outcome["processes"] = [asdict(agent.status()) for agent in gang]
        for agent in gang:
            status = agent.status()
            mine = f"{status.blocks} blocks, {status.block_bytes / 2**30:.2f} GiB, {status.stuck} stuck"
            others = f"{status.imported} imported, {status.peer_access} peers, {status.multicast} multicast"
            drivers = f"{status.ipc_memory} opened and {status.ipc_events} events by the driver's IPC"
            print(f"    {agent.pid}: {mine}; {others}; {drivers}", flush=True)
        for cycle in range(options.cycles):
            shared, held = freeze(driver, gang, times)
            thaw(driver, gang, times, shared, held)
            outcome["cycles"] = cycle + 1
            for agent in gang:
                after = agent.status()
                if after.stuck or after.away:
                    raise RuntimeError(f"after cycle {cycle + 1}: process {agent.pid}: {after}")
            if not program.wait_lines(len(program.lines) + 3, STEP_LIMIT_S):
                raise RuntimeError(f"no step after cycle {cycle + 1} (more steps?): {program.error_text()}")


def try_case(name: str, library: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run, disturb, compare."""
    command = [
        sys.executable,
        str(PROGRAMS / CASES[name]),
        str(options.steps or 40 + 20 * options.cycles),
        str(PAUSE_S),
    ]
    print(f"{name}: {' '.join(command)}", flush=True)
    outcome: dict[str, Any] = {"case": name, "cycles": 0}
    times = Times()
    expected = undisturbed(command, options.limit)
    program = Program(command, {"LD_PRELOAD": str(library), "NCCL_NVLS_ENABLE": "0"})
    try:
        if not program.wait_lines(2, options.limit):
            raise RuntimeError(f"it did not start under the interposer: {program.error_text()}")
        disturb(program, options, times, outcome)
    except (Exception, StepTookTooLong) as error:  # noqa: BLE001 (told, with the times that there are)
        outcome["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        processes.kill_tree(program.process.pid, including_root=True)
    code = program.finish(options.limit)
    same = program.lines == expected
    outcome |= {"exit": code, "same": same, "lines": len(expected), "times": times.steps}
    print(times.table())
    print(f"    {outcome['cycles']} of {options.cycles} cycles; exit code {code}; "
          + (f"all {len(expected)} lines as undisturbed" if same else "NOT AS UNDISTURBED"))  # fmt: skip
    if not same or code != 0:
        print(f"    FAILED: {outcome.get('error')}\n    stderr: {program.error_text()}")
    return outcome


def main() -> int:
    """All cases. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--limit", type=float, default=180, help="seconds for one run of a program")
    parser.add_argument("--only", choices=list(CASES), action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, on_alarm)
    gpus = gpu_count()
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(Path(folder))
        for name in options.only or CASES:
            if name in NEEDS_TWO_GPUS and gpus < 2:
                print(f"{name}: SKIPPED, it needs two GPUs")
            else:
                outcomes.append(try_case(name, library, options))
    if options.json is not None:
        options.json.write_text(json.dumps(outcomes, indent=1))
    for each in outcomes:
        verdict = "ok" if each["same"] and each["exit"] == 0 and "error" not in each else "FAILED"
        print(f"{each['case']:6} {each['cycles']:3} cycles  {verdict}")
    return 0 if all(each["same"] and each["exit"] == 0 and "error" not in each for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
