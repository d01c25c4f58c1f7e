"""A batch system that starts a job repeatedly, each time with a separate output."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

from gpucr.jobs.registered import registry
from gpucr.operations.end_job import end_processes
from tests import command
from tests.counter import DEADLINE_S, wait_until

COUNTS = """
import os, sys, time
for step in range({steps}):
    print("step", step, flush=True)
    while step == {stop_at} and not os.path.exists("go"):
        time.sleep(0.01)
    time.sleep(0.01)
print(open(os.environ["GPUCR_ENV_FILE"]).read(), flush=True)
sys.exit({code})
"""

STEPS = 40
RESULT = sum(range(STEPS))

# The sum lives in device memory. It waits at a step until there is a file `go`.
SUMS = f"""
import ctypes, os, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
context, memory, value = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, (name, result)
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(1 << 20))
call("cuMemcpyHtoD_v2", memory, ctypes.byref(value), ctypes.c_size_t(8))
for step in range({STEPS}):
    call("cuMemcpyDtoH_v2", ctypes.byref(value), memory, ctypes.c_size_t(8))
    value.value += step
    call("cuMemcpyHtoD_v2", memory, ctypes.byref(value), ctypes.c_size_t(8))
    print("step", step, flush=True)
    time.sleep(float(os.environ.get("STEP_S", 0)))
    while step % 10 == 9 and not os.path.exists(f"go-{{step}}"):
        time.sleep(0.01)
print("result", value.value, flush=True)
"""


class Batch:
    """The batch system: each start of a job has a separate output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.starts: list[subprocess.Popen[str]] = []

    def start(
        self,
        *options: object,
        steps: int = 60,
        stop_at: int = -1,
        code: int = 0,
        program: str | None = None,
        **variables: str,
    ) -> Path:
        """Start the job, one that counts if there is no ``program``; returns what it prints to."""
        number = len(self.starts)
        output = self.folder / f"output-{number}"
        program = program or COUNTS.format(steps=steps, stop_at=stop_at, code=code)
        words = ["--to", self.store, *options, "--", sys.executable, "-I", "-S", "-c", program]
        with output.open("w") as out, (self.folder / f"errors-{number}").open("w") as errors:
            started = subprocess.Popen(
                command.command("batch", *words),
                stdout=out,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                text=True,
                cwd=self.folder,
                env={**os.environ, "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": str(number), **variables},
            )
        self.starts.append(started)
        return output

    def errors(self) -> str:
        """gpucr's messages about the last start."""
        return (self.folder / f"errors-{len(self.starts) - 1}").read_text()

    def end(self) -> int:
        """The exit code of the last start."""
        return self.starts[-1].wait(DEADLINE_S)

    def steps(self) -> list[str]:
        """The steps that all starts have printed."""
        outputs = [(self.folder / f"output-{number}").read_text() for number in range(len(self.starts))]
        return [line for line in "".join(outputs).splitlines() if line.startswith("step")]

    def snapshots(self) -> list[str]:
        """The names of the snapshots in the store."""
        return [each["name"] for each in command.run_json("ls", self.store)["snapshots"]]

    def close(self) -> None:
        """End what still runs."""
        for started in self.starts:
            if started.poll() is None:
                started.kill()
                started.wait(DEADLINE_S)
        for job in registry().jobs():
            if job.record is not None and job.state.word == "running":
                with contextlib.suppress(OSError):
                    end_processes(job.record)


def last_start(said: str) -> str:
    """The output of a job and `gpucr batch` since its last start or restore."""
    return re.split("gpucr batch: (?:restored from|started as)", said)[-1]


def wait_for_line(output: Path, line: str) -> None:
    wait_until(lambda: line in output.read_text().splitlines(), lambda: f"{line!r} in {output.read_text()[-500:]!r}")
