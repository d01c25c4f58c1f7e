"""A lock that has to be given up must leave the job alive: one rank submits nothing, so its peers cannot be locked.

Run it from the root of the repository on a machine with as many GPUs as ranks::

    python3 tests/hardware/held_rank.py --seconds 10 --how leader --transport shared_memory --out results

A job of ranks runs (see gang_lock.py). One rank is told to submit nothing more, while the others have a collective
under way that waits for it. Then the job is locked for --seconds, which must fail:

* ``--how leader``: as gpucr does (`gpucr.gang.Gang`, holding the leader).
* ``--how hammer``: as often as possible. All ranks at once, each lock with a timeout of --timeout-ms, whoever gets
  locked is unlocked again.

Afterwards every process must be running, and once the held rank submits again the job must make progress with right
values (each all-reduce is checked), be locked and unlocked, and, where the transport allows it, be checkpointed and
restored. Prints one line, writes ``held_rank.json`` into --out, exits with 1 when anything of that did not happen.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from gpucr.driver.cuda import CudaDriver, load_driver  # noqa: E402 - found where the checkout is
from gpucr.errors import GpucrError, LockTimeout  # noqa: E402
from gpucr.gang import Gang, discover  # noqa: E402
from gpucr.linux import processes  # noqa: E402
from gpucr.model import CudaState  # noqa: E402
from tests.hardware.gang_lock import Failed, Job  # noqa: E402

STEPS = 20
"""How many steps every rank must make to show that the job runs."""

AFTERWARDS_S = 60.0
"""How long the locks and the restore that come after may take."""


def gang_of(driver: CudaDriver, job: Job, ranks: int, limit_s: float) -> Gang:
    """The job's CUDA processes, to be locked within so many seconds."""
    gang = Gang(driver, discover(driver, processes.tree(job.pid)), deadline=time.monotonic() + limit_s)
    if len(gang.members) < ranks:
        raise Failed(f"{len(gang.members)} processes of the job use CUDA, not {ranks}")
    return gang


def follow_the_leader(driver: CudaDriver, job: Job, ranks: int, seconds: float) -> str:
    """Lock as gpucr does. Returns what it said when it gave up."""
    gang = gang_of(driver, job, ranks, seconds)
    try:
        gang.lock()
    except GpucrError as error:
        gang.return_to_found()
        return str(error)
    raise Failed("the job was locked although a rank submits nothing: the test shows nothing")


def hammer(driver: CudaDriver, job: Job, ranks: int, seconds: float, timeout_ms: int) -> str:
    """Lock all at once, unlock who was locked, again and again. Returns how often."""
    gang = gang_of(driver, job, ranks, seconds)
    pids = [member.pid for member in gang.members]
    attempts = timeouts = 0

    def attempt(pid: int) -> bool:
        try:
            driver.lock(pid, timeout_ms)
        except LockTimeout:
            return False
        driver.unlock(pid)
        return True

    end = time.monotonic() + seconds
    with ThreadPoolExecutor(len(pids)) as pool:
        while time.monotonic() < end:
            locked = list(pool.map(attempt, pids))
            attempts += 1
            timeouts += locked.count(False)
            if all(locked):
                raise Failed("all ranks were locked although one submits nothing: the test shows nothing")
    return f"{attempts} attempts, {timeouts} timed out"


def look_at_states(driver: CudaDriver, job: Job) -> None:
    """Every CUDA process of the job is running."""
    states = {member.pid: member.found for member in discover(driver, processes.tree(job.pid))}
    if set(states.values()) != {CudaState.RUNNING}:
        raise Failed(f"not all are running after the lock was given up: {states}")


def lock_again(driver: CudaDriver, job: Job, ranks: int, *, checkpoint: bool) -> None:
    """The job can be locked, and checkpointed and restored if that is asked for."""
    gang = gang_of(driver, job, ranks, AFTERWARDS_S)
    gang.lock()
    if checkpoint:
        gang.checkpoint()
        gang.restore(down_to=lambda member: CudaState.RUNNING)
    gang.unlock(down_to=lambda member: CudaState.RUNNING)


def try_it(options: argparse.Namespace, job: Job) -> str:
    """The whole case. Returns what the attempts to lock came to. Raises Failed if the job is not well."""
    driver = load_driver()
    job.wait_steps(STEPS)
    held = job.pid_of(options.ranks - 1)
    os.kill(held, signal.SIGUSR1)
    job.wait_standstill()
    before = job.steps_done()
    if options.how == "leader":
        said = follow_the_leader(driver, job, options.ranks, options.seconds)
    else:
        said = hammer(driver, job, options.ranks, options.seconds, options.timeout_ms)
    if job.steps_done() != before:
        raise Failed(f"{said}; the job made steps although a rank submits nothing")
    look_at_states(driver, job)
    os.kill(held, signal.SIGUSR2)
    try:
        job.wait_steps(STEPS)
        lock_again(driver, job, options.ranks, checkpoint=options.transport == "shared_memory")
        job.wait_steps(STEPS)
    except (Failed, GpucrError) as failed:
        raise Failed(f"{said}; THE JOB IS NOT WELL: {failed}") from failed
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, run, write the result. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--program", choices=["train", "allreduce", "sim"], default="train", help="what the ranks do")
    parser.add_argument("--ranks", type=int, default=2, help="how many; the last one is held")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to try")
    parser.add_argument("--how", choices=["leader", "hammer"], default="leader", help="as gpucr does, or in a loop")
    parser.add_argument("--timeout-ms", type=int, default=100, metavar="MS", help="of each lock of a hammer")
    parser.add_argument(
        "--transport", choices=["shared_memory", "default"], default="shared_memory",
        help="NCCL's settings: those that the driver can checkpoint, or none (P2P); then it is only locked",
    )  # fmt: skip
    parser.add_argument("--deadline", type=float, default=120.0, metavar="S", help="seconds until a wait is a hang")
    parser.add_argument("--out", type=Path, required=True, help="folder for the job's files and held_rank.json")
    options = parser.parse_args(arguments)
    out: Path = options.out.resolve()
    if out.exists() and any(out.iterdir()):
        parser.error(f"{out} is not empty")
    job = Job(options.program, options.ranks, out, options.deadline, transport=options.transport)
    try:
        said, ok = try_it(options, job), True
    except (Failed, GpucrError) as failed:
        said, ok = f"{failed}", False
    finally:
        job.kill()
    summary = {
        "program": options.program, "how": options.how, "transport": options.transport, "seconds": options.seconds,
        "ok": ok, "said": said, "log": job.log_path.read_text(errors="replace")[-2000:] if not ok else "",
    }  # fmt: skip
    (out / "held_rank.json").write_text(json.dumps(summary, indent=2))
    print(" ".join(f"{name}={value}" for name, value in summary.items() if name != "log"))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
