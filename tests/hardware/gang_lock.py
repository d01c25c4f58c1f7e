"""A running job of several ranks is locked and unlocked again and again, and continues every time.

Run it from the root of the repository on a machine with GPUs, which ranks may share (programs/rank_place.py)::

    python3 tests/hardware/gang_lock.py --ranks 2 --times 20 --out results

The job is torchrun with ranks that train (DistributedDataParallel, ``--program train``) or only all-reduce
(``--program allreduce``) over NCCL, with the settings that driver 580 can checkpoint (shared memory instead of peer
access); ``--program sim`` is `gpucr sim ranks` on the simulated driver. It is locked as gpucr locks it before a
checkpoint (`gpucr.gang.Gang`). After each unlock every rank must make --steps further steps.

Prints a line a lock, then the median and the longest; writes ``gang_lock.json`` into --out; exits with 1 when a lock
failed, a rank was left locked, or the job did not continue.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from gpucr.driver.cuda import load_driver  # noqa: E402 - found where the checkout is
from gpucr.errors import GpucrError  # noqa: E402
from gpucr.gang import Gang, discover  # noqa: E402
from gpucr.linux import processes  # noqa: E402
from gpucr.model import CudaState  # noqa: E402

SHARED_MEMORY = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0", "USE_LIBUV": "0"}
"""NCCL over shared memory, which driver 580 brings back; torch's store without io_uring."""


class Failed(Exception):
    """Something is not as it should be; the message says what."""


@dataclass(frozen=True)
class Row:
    """One lock: how many attempts and seconds it took, and what was wrong, if anything."""

    number: int
    attempts: int
    seconds: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether all ranks were locked, and continued afterwards."""
        return not self.detail


class Job:
    """The running job, in a session of its own. ``steps`` has a file a rank that grows or changes with each step."""

    def __init__(
        self, program: str, ranks: int, folder: Path, deadline_s: float, *, transport: str = "shared_memory"
    ) -> None:
        self._ranks, self._deadline_s = ranks, deadline_s
        self._is_simulated = program == "sim"
        self.steps = folder / "steps"
        self.steps.mkdir(parents=True)
        self.log_path = folder / "log"
        with self.log_path.open("wb") as log:
            self._child = subprocess.Popen(
                self._command(program),
                env={**os.environ, **(SHARED_MEMORY if transport == "shared_memory" else {})},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._child.pid

    def _command(self, program: str) -> list[str]:
        if self._is_simulated:
            return [sys.executable, "-m", "gpucr", "sim", "ranks", str(self._ranks), "--status-dir", str(self.steps)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self._ranks}"]
        return [*torchrun, "-m", "tests.hardware.programs.ddp_loop", str(self.steps), "--work", program]

    def steps_done(self) -> list[int]:
        """By each rank that has started."""
        return [self._steps_in(path) for path in sorted(self.steps.glob("rank-*"))]

    def _steps_in(self, path: Path) -> int:
        if not self._is_simulated:
            return path.stat().st_size
        words = dict(word.partition("=")[::2] for word in path.read_text().split())
        return int(words.get("steps", 0))

    def pid_of(self, rank: int) -> int:
        """The rank's process. It submits nothing more after SIGUSR1, until SIGUSR2."""
        status = self.steps / (f"rank-{rank:03}" if self._is_simulated else f"pid-{rank:03}")
        text = status.read_text()
        return int(dict(word.partition("=")[::2] for word in text.split())["pid"])

    def wait_standstill(self) -> None:
        """Wait until a rank that submits nothing has brought all others to a stop, for half a second."""
        seen = [(time.monotonic(), self.steps_done())]

        def stands() -> bool:
            now = (time.monotonic(), self.steps_done())
            if now[1] != seen[0][1]:
                seen[0] = now
            return now[0] - seen[0][0] > 0.5

        self._wait(stands, "that the job stands still")

    def wait_steps(self, more: int) -> None:
        """Wait until every rank has made so many more steps. Raises Failed when the deadline passes."""
        before = self.steps_done()
        before += [0] * (self._ranks - len(before))

        def made() -> bool:
            if self._child.poll() is not None:
                raise Failed(f"the job ended with {self._child.returncode}: {self._log_tail()}")
            now = self.steps_done()
            return len(now) == self._ranks and all(b - a >= more for a, b in zip(before, now, strict=True))

        self._wait(made, f"{more} more steps of every rank")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self._deadline_s
        while not condition():
            if time.monotonic() > end:
                raise Failed(f"{what} did not happen within {self._deadline_s:.0f} s: {self._log_tail()}")
            time.sleep(0.005)

    def _log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-400:].strip()

    def kill(self) -> None:
        """End the job and what it has started."""
        tree = processes.tree(self.pid) if self._child.poll() is None else ()
        for pid in [self.pid, *(process.pid for process in tree)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._child.wait(self._deadline_s)


def lock_once(job: Job, number: int, ranks: int, limit_s: float) -> Row:
    """Lock the job, look that all are locked, and unlock it."""
    driver = load_driver()
    gang = Gang(driver, discover(driver, processes.tree(job.pid)), deadline=time.monotonic() + limit_s)
    if len(gang.members) < ranks:  # torchrun's agent may be one more
        raise Failed(f"{len(gang.members)} processes of the job use CUDA, not {ranks}")
    begin = time.monotonic()
    try:
        lock = gang.lock()
        states = {gang.state(member.pid) for member in gang.members}
        gang.unlock(down_to=lambda member: CudaState.RUNNING)
    except GpucrError as error:
        gang.return_to_found()
        return Row(number, 0, time.monotonic() - begin, str(error))
    return Row(number, lock.attempts, lock.seconds, "" if states == {CudaState.LOCKED} else f"states {states}")


def lock_again_and_again(job: Job, times: int, ranks: int, steps: int, limit_s: float) -> list[Row]:
    """One row a lock. Ends early when the job does not continue."""
    rows: list[Row] = []
    print(f"{'lock':>4} {'attempts':>9} {'seconds':>9}")
    for number in range(1, times + 1):
        try:
            job.wait_steps(steps)
            rows.append(lock_once(job, number, ranks, limit_s))
        except Failed as failed:
            rows.append(Row(number, 0, 0.0, str(failed)))
        row = rows[-1]
        print(f"{row.number:>4} {row.attempts:>9} {row.seconds:>9.4f}  {row.detail}", flush=True)
        if row.attempts == 0:
            break
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, run, write the results. Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--program", choices=["train", "allreduce", "sim"], default="train", help="what the ranks do")
    parser.add_argument("--ranks", type=int, default=2, help="how many")
    parser.add_argument("--times", type=int, default=20, help="how often the job is locked")
    parser.add_argument("--steps", type=int, default=3, help="steps of every rank between two locks")
    parser.add_argument("--limit", type=float, default=30.0, metavar="S", help="seconds that a lock may take")
    parser.add_argument("--deadline", type=float, default=180.0, metavar="S", help="seconds until a wait is a hang")
    parser.add_argument("--out", type=Path, required=True, help="folder for the job's files and gang_lock.json")
    options = parser.parse_args(arguments)
    out: Path = options.out.resolve()
    if out.exists() and any(out.iterdir()):
        parser.error(f"{out} is not empty")
    job = Job(options.program, options.ranks, out, options.deadline)
    try:
        rows = lock_again_and_again(job, options.times, options.ranks, options.steps, options.limit)
        if rows[-1].ok:
            job.wait_steps(options.steps)
    except Failed as failed:
        rows.append(Row(len(rows) + 1, 0, 0.0, f"after the last lock: {failed}"))
    finally:
        job.kill()
    good = [row for row in rows if row.ok]
    summary = {
        "program": options.program,
        "ranks": options.ranks,
        "ok": len(good) == options.times == len(rows),
        "locks": len(good),
        "seconds_median": statistics.median(row.seconds for row in good) if good else None,
        "seconds_max": max((row.seconds for row in good), default=None),
        "attempts_median": statistics.median(row.attempts for row in good) if good else None,
        "attempts_max": max((row.attempts for row in good), default=None),
    }
    (out / "gang_lock.json").write_text(json.dumps({**summary, "rows": [asdict(row) for row in rows]}, indent=2))
    print(" ".join(f"{name}={value}" for name, value in summary.items()))
    return 0 if summary["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
