"""Programs that monitor GPUs through NVML, like training loggers: the driver has a state for them too.

On the simulated driver such a program has no CUDA, and no device files: there it is dumped as any other child.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpucr
from gpucr.linux import processes
from gpucr.model import CudaState
from gpucr.sim import build as simulator
from tests.counter import wait_until
from tests.lines import complete_lines
from tests.sandboxed import SandboxedCounter, wait_ready

pytestmark = pytest.mark.criu

WATCHER = """
import pynvml, time
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
for number in range(1 << 30):
    try:
        print(number, "ok" if pynvml.nvmlDeviceGetMemoryInfo(gpu).total else "nothing", flush=True)
    except pynvml.NVMLError as error:
        print(number, error, flush=True)
    time.sleep(0.02)
"""
BESIDE = '"$1" -c "$2" >watched & exec "$3" --port 0 --mib 2'


def start(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    with (folder / "stdout").open("wb") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder, start_new_session=True
        )


def wait_watching(log: Path) -> None:
    """Wait until it has watched for some more time. All that it has seen since its start must be well, and follow."""
    wanted = len(complete_lines(log)) + 10
    wait_until(lambda: len(complete_lines(log)) >= wanted, "the watcher to continue")
    assert complete_lines(log) == [f"{number} ok" for number in range(len(complete_lines(log)))]


def test_in_the_tree_of_a_job(folder: Path, tmp_path: Path) -> None:
    log = folder / "watched"
    job = start(folder, "sh", "-c", BESIDE, "sh", sys.executable, WATCHER, str(simulator.build() / "counter"))
    port = wait_ready(folder / "stdout")
    wait_watching(log)
    names = [each.name for each in processes.tree(job.pid)]
    assert len(names) == 2
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid)
    wait_watching(log)
    gpucr.dump(job.pid, tmp_path / "first", leave_running=True)
    wait_watching(log)
    gpucr.dump(job.pid, tmp_path / "second")
    job.wait()
    restored_pid = gpucr.restore(tmp_path / "second").pid
    assert [each.name for each in processes.tree(restored_pid)] == names
    wait_watching(log)
    with SandboxedCounter(restored_pid, port) as restored:
        assert restored.ask() == 101


def test_alone(folder: Path, tmp_path: Path, platform: str) -> None:
    if platform != "gpu":
        pytest.skip("only the driver has a state for a program that watches")
    log = folder / "stdout"
    watcher = start(folder, sys.executable, "-c", WATCHER)
    wait_watching(log)
    assert [each.now for each in gpucr.suspend(watcher.pid).processes] == [CudaState.CHECKPOINTED]
    files = map(os.readlink, Path(f"/proc/{watcher.pid}/fd").iterdir())
    assert not [file for file in files if file.startswith("/dev/nvidia")]
    gpucr.resume(watcher.pid)
    wait_watching(log)
    gpucr.dump(watcher.pid, tmp_path / "s")
    watcher.wait()
    gpucr.restore(tmp_path / "s")
    wait_watching(log)
