"""torch.multiprocessing with a CUDA tensor that is shared: refused before anything happens; the job runs on. As root.

    python3 tests/hardware/shared_tensor.py

Starts programs/shared_tensor.py in its three ways and asks `gpucr suspend` to take each. With the tensor open or closed
gpucr must refuse (exit code 3) and leave the job as it was; a job whose processes share nothing is refused too, unless
canaries or --force speak for it, and with --force comes back. Prints a line a case; exits with 1 when one was not so.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from gpucr.linux import processes  # noqa: E402 - found where the checkout is

LIMIT_S = 120.0
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


class Job:
    """The program, running and ready."""

    def __init__(self, how: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.hardware.programs.shared_tensor", "--how", how],
            cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.pid = self._child.pid
        if self._line() != "ready":
            raise SystemExit(f"{how}: the program did not become ready")

    def _line(self) -> str:
        assert self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], LIMIT_S)
        return self._child.stdout.readline().strip() if ready else "no answer"

    def ask(self) -> str:
        """The sums that child and parent see."""
        assert self._child.stdin is not None
        self._child.stdin.write("?\n")
        self._child.stdin.flush()
        return self._line()

    def kill(self) -> None:
        """End both processes."""
        processes.kill_tree(self.pid, including_root=True)
        self._child.wait()


def gpucr(*words: str) -> tuple[int, str]:
    """Exit code and stderr of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "gpucr", *words],
        env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    return done.returncode, done.stderr


def try_it(how: str) -> bool:
    """One case."""
    job = Job(how)
    try:
        before = job.ask()
        codes = [gpucr("suspend", str(job.pid))]
        between = job.ask()
        if how != "open":
            codes += [gpucr("suspend", "--force", str(job.pid)), gpucr("resume", str(job.pid))]
        after = job.ask()
    finally:
        job.kill()
    number = 1 << 20
    expected = [
        f"{number * k}.0 {number * (k if how == 'open' else 1)}.0" for k in (2, 3, 4)
    ]  # the child's own sum, and the parent's, which changes only where the tensor is shared
    wanted = [3, 0, 0][: len(codes)]
    ok = [before, between, after] == expected and [code for code, _ in codes] == wanted
    print(
        f"{how}: {'ok' if ok else 'WRONG'} {json.dumps({'sums': [before, between, after], 'gpucr': codes})}", flush=True
    )
    return ok


def main() -> int:
    """All cases. Returns the exit code."""
    return 0 if all(list(map(try_it, ("open", "closed", "apart")))) else 1


if __name__ == "__main__":
    sys.exit(main())
