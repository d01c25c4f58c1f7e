"""Jobs of `gpucr batch` in a test pool, submitted with the documentation's files."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from tests import command
from tests.batch.htcondor import GPUS_PER_NODE, NODE_FOLDER, TEMPLATES, HtCondor
from tests.batch.system import RESULT, STEPS, SUMS
from tests.counter import processes_in, wait_until
from tests.ordinary_user import OrdinaryUser

COMPLETED, HELD = "4", "5"
_LIMIT_S = 60.0
_POLL_S = 0.2  # each look is a command
_LOOK_S = 0.05  # into files

# It starts on n1, and each time on the other one.
_IN_TURN = 'requirements = Machine == (NumJobStarts % 2 == 0 ? "n1" : "n2")'


class Jobs:
    """The jobs that one test submits as ``user``, with their own folder and store."""

    def __init__(self, pool: HtCondor, user: OrdinaryUser) -> None:
        self.pool = pool
        self._user = user
        self.folder = Path(tempfile.mkdtemp(dir=user.home))
        self.store = self.folder / "store"
        self._write("sums.py", SUMS)
        os.chown(self.folder, user.uid, user.uid)
        self._submitted: list[str] = []

    def _write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def submit(
        self, kind: Literal["shared", "transfer"], options: str, *appended: str, program: str = "sums.py"
    ) -> str:
        """Submit a job with a page's file and script, adapted to the test's paths, ``options`` and program."""
        script = (TEMPLATES / f"{kind}.sh").read_text()
        end = script.index("exec gpucr batch")
        store = str(self.store) if kind == "shared" else '"$_CONDOR_SCRATCH_DIR/snapshots"'
        assert f"--to {'/shared/snapshots' if kind == 'shared' else store} " in script
        batch = shlex.join(command.command("batch"))
        name = f"{kind}-{len(self._submitted)}.sh"
        self._write(
            name,
            f"{script[:end].replace('/data/work', str(self.folder))}{self._environment()}"
            f"exec {batch} --to {store} {options} -- "
            f"{shlex.join([sys.executable, '-I', '-S', program])}\n",
        )
        shutil.copy(TEMPLATES / f"{kind}.sub", self.folder)
        words = [word for line in (f"executable = {name}", _IN_TURN, *appended) for word in ("-append", line)]
        said = self._as_user("condor_submit", "-terse", *words, f"{kind}.sub")
        job_id = said.split()[0]
        self._submitted.append(job_id)
        return job_id

    def _environment(self) -> str:
        """The environment with the simulator as driver and separate folders for a node."""
        variables = {
            **self._user.environment,
            "GPUCR_SIM_GPUS": f"{GPUS_PER_NODE}x1GiB",
            "GPUCR_SIM_STATE": f"{NODE_FOLDER}/sim",
            "XDG_STATE_HOME": f"{NODE_FOLDER}/state",
        }
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables.items() if name != "PATH"]
        return "".join([*lines, "export GPUCR_SIM_MACHINE=$(hostname)\n"])

    def _as_user(self, program: str, *words: str) -> str:
        return self.pool.run(program, *words, prefix=[*self._user.as_himself(), "env", "-C", str(self.folder)])

    def tell(self, program: str, job_id: str) -> None:
        """Run one of HTCondor's commands on a job."""
        self._as_user(program, job_id)

    def ad(self, job_id: str, attribute: str) -> str:
        """The job's data from the queue or its history; empty if neither has it."""
        words = (job_id, "-af", attribute)
        return (self.pool.run("condor_q", *words) or self.pool.run("condor_history", *words)).strip()

    def wait_for(self, job_id: str, status: str) -> None:
        """Wait until it has this status."""
        wait_until(
            lambda: self.ad(job_id, "JobStatus") == status,
            lambda: f"{status}: {self.ad(job_id, 'JobStatus')} {self.ad(job_id, 'HoldReason')} {self.log(job_id)}",
            _LIMIT_S,
            _POLL_S,
        )

    def wait_for_line(self, job_id: str, text: str, count: int = 1) -> None:
        """Wait until its log has that."""
        wait_until(
            lambda: self.log(job_id).count(text) >= count, lambda: f"{text}: {self.log(job_id)}", _LIMIT_S, _LOOK_S
        )

    def log(self, job_id: str) -> str:
        """What it and gpucr have printed so far: on the node where it runs, or brought back from there."""
        found = sorted(self.folder.glob(f"job.{job_id}.*")) or sorted(
            self.pool.folder.glob("n?/execute/*/_condor_std*")
        )
        return "".join(path.read_text() for path in found)

    def node(self, job_id: str) -> str:
        """The node it runs on."""
        return self.ad(job_id, "RemoteHost").rpartition("@")[2]

    def go(self, *steps: int) -> None:
        """Let all that wait at these steps continue."""
        for step in steps:
            (self.folder / f"go-{step}").touch()

    def go_on_to_the_end(self) -> None:
        """Release all waiting steps."""
        self.go(*range(9, STEPS, 10))

    def require_right(self, job_id: str) -> None:
        """Assert that it succeeds, with each step once and the right result."""
        self.wait_for(job_id, COMPLETED)
        lines = [line for line in self.log(job_id).splitlines() if line.startswith(("step", "result"))]
        assert lines == [*(f"step {step}" for step in range(STEPS)), f"result {RESULT}"], self.log(job_id)
        assert self.ad(job_id, "ExitCode") == "0"

    def snapshots(self) -> list[str]:
        """The names of the snapshots in the store."""
        found: list[dict[str, Any]] = json.loads(self._user.succeeds("ls", self.store, "--json"))["snapshots"]
        return [each["name"] for each in found]

    def clean(self) -> None:
        """Run the page's script that removes unneeded snapshots."""
        (self.folder / "bin").mkdir(exist_ok=True)
        self._write("bin/gpucr", f'#!/bin/sh\nexec {shlex.join(command.command())} "$@"\n')
        script = f'PATH="$PWD/bin:{self.pool.folder}/bin:$PATH" exec "$@"'
        self._as_user("sh", "-c", script, "sh", sys.executable, str(TEMPLATES / "clean.py"), str(self.store))

    def processes(self) -> list[int]:
        """The processes of jobs: those in the test's folder that are not HTCondor's."""
        return [pid for pid in processes_in(self.folder) if b"condor_" not in _command_of(pid)]

    def wait_for_processes(self, count: int) -> None:
        """Wait until at most these are left."""
        wait_until(lambda: len(self.processes()) <= count, lambda: f"the end of {self.processes()}", _LIMIT_S, _LOOK_S)

    def close(self) -> None:
        """End them all."""
        for job_id in self._submitted:
            if self.pool.run("condor_q", job_id, "-af", "ClusterId"):
                self.pool.run("condor_rm", job_id)
        self.wait_for_processes(0)


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b"condor_"
