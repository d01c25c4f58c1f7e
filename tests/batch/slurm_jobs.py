"""Jobs of `gpucr batch` on a test cluster."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from gpucr.sim import build as simulator
from tests import command
from tests.batch.slurm import GPUS_PER_NODE, Slurm
from tests.batch.system import RESULT, STEPS, SUMS
from tests.counter import processes_in, wait_until
from tests.ordinary_user import OrdinaryUser


class Jobs:
    """The jobs that one test submits, with their own folder and store."""

    def __init__(self, slurm: Slurm, folder: Path, user: OrdinaryUser | None = None) -> None:
        self.slurm = slurm
        self._user = user
        self.folder = folder
        self.store = folder / "store"
        (folder / "sums.py").write_text(SUMS)
        self._submitted: list[str] = []

    def submit(self, *sbatch: str, options: str = "", before: str = "exec", step_s: float = 0) -> str:
        """Submit a job that adds up under `gpucr batch`."""
        words = [*command.command("batch"), "--to", str(self.store)]
        program = [sys.executable, "-I", "-S", "sums.py"]
        script = (
            "#!/bin/sh\n"
            "trap '' USR1\n"
            "export GPUCR_SIM_MACHINE=$(hostname)\n"
            f"{before} {shlex.join(words)} {options} -- {shlex.join(program)}\n"
        )
        given = ["--requeue", "--open-mode=append", "--gres=gpu:1", f"--output={self.folder}/out-%j"]
        variables = {
            "XDG_STATE_HOME": str(self.folder / "state"),
            "STEP_S": str(step_s),
        }
        if self._user is None:
            variables |= simulator.environment(state_dir=Path("/run/gpucr-sim"), fixed_cost_ms=1)
        else:
            variables |= self._user.environment
        variables |= {"GPUCR_SIM_GPUS": f"{GPUS_PER_NODE}x1GiB"}
        prefix = () if self._user is None else self._user.as_himself()
        job_id = self.slurm.submit(script, *given, f"--chdir={self.folder}", *sbatch, env=variables, prefix=prefix)
        self._submitted.append(job_id)
        return job_id

    def output(self, job_id: str) -> str:
        """Its output so far."""
        path = self.folder / f"out-{job_id}"
        return path.read_text() if path.exists() else ""

    def wait_for(self, job_id: str, text: str, count: int = 1) -> None:
        """Wait until it has printed that."""
        wait_until(lambda: self.output(job_id).count(text) >= count, lambda: f"{text}: {self.output(job_id)}")

    def go(self, step: int) -> None:
        """Let all that wait at a step continue."""
        (self.folder / f"go-{step}").touch()

    def go_on_to_the_end(self) -> None:
        """Release all waiting steps."""
        for step in range(9, STEPS, 10):
            self.go(step)

    def require_right(self, job_id: str) -> None:
        """Assert that it succeeds, with each step once and the right result, and that its snapshots are gone."""
        self.require_complete(job_id)
        assert self.snapshots() == []

    def require_complete(self, job_id: str) -> None:
        """Assert that it succeeds, with each step once and the right result."""
        self.slurm.wait_for(job_id, "COMPLETED")
        lines = [line for line in self.output(job_id).splitlines() if line.startswith(("step", "result"))]
        assert lines == [*(f"step {step}" for step in range(STEPS)), f"result {RESULT}"], self.output(job_id)

    def snapshots(self) -> list[dict[str, Any]]:
        """The snapshots in the store."""
        found: list[dict[str, Any]] = command.run_json("ls", self.store)["snapshots"]
        return found

    def close(self) -> None:
        """End them all."""
        if self._submitted:
            self.slurm.run("scancel", *self._submitted)
            wait_until(lambda: processes_in(self.folder) == [], "the jobs to end")
