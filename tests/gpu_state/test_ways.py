"""`--gpu-state`: device memory leaves the GPU in the requested way, or nothing happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import InvalidRequest, LockTimeout, Unsupported
from gpucr.gpu_state import staging
from gpucr.gpu_state.ways import GpuState
from gpucr.interposer.client import Agent, Closed
from gpucr.interposer.library import installed, preload_path
from gpucr.linux import capabilities
from gpucr.model import CudaState
from gpucr.sim import build as simulator
from tests.conftest import skip_or_fail
from tests.counter import Counter, CounterFactory, processes_in, wait_until

pytestmark = pytest.mark.in_turn

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED
SIZE_BYTES = 24 << 20


@pytest.fixture(autouse=True)
def as_root() -> None:
    if not capabilities.can_checkpoint_processes():
        skip_or_fail("root", "staging is captured by root alone")


@pytest.fixture
def interposed(counter: CounterFactory, sim_only: None, tmp_path: Path) -> Counter:
    """A counter that may go each way."""
    environment = {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(tmp_path / "agents")}
    return counter("--mib", "24", env=environment)


def assert_runs(job: Counter, driver: CudaDriver) -> None:
    assert [driver.state(pid) for pid in job.processes()] == [RUNNING] * len(job.processes())
    assert job.send("verify") == "ok"


@pytest.mark.parametrize("way", get_args(GpuState))
def test_a_suspend_uses_the_requested_way(
    way: GpuState, interposed: Counter, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "custom":
        monkeypatch.setenv("GPUCR_SIM_DRIVER", "615")
    for _ in range(2):
        gpucr.suspend(interposed.pid, gpu_state=way)
        assert driver.state(interposed.pid) is CHECKPOINTED
        held_bytes = staging.total_bytes(staging.file_extents(interposed.pid))
        assert (held_bytes >= SIZE_BYTES) == (way == "captured"), held_bytes
        gpucr.resume(interposed.pid)
        assert_runs(interposed, driver)


def test_a_process_without_an_interposer_cannot_use_it(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--mib", "8")
    with pytest.raises(
        Unsupported, match=f"process {job.pid} cannot leave by an interposer: it was started without"
    ) as e:
        gpucr.suspend(job.pid, gpu_state="interposed")
    assert e.value.code == "GPUCR-GPU-STATE"
    assert_runs(job, driver)
    notes: list[str] = []
    gpucr.suspend(job.pid, on_progress=lambda progress: notes.append(progress.description))
    assert not [note for note in notes if "interposer" in note], "nobody has asked for one"
    gpucr.resume(job.pid)
    assert_runs(job, driver)


def test_a_process_without_device_memory_does_not_block_the_others(
    driver: CudaDriver, sim_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like torch.compile's workers, which have a context and no memory of their own."""
    monkeypatch.setenv("GPUCR_INTERPOSER_DIR", str(tmp_path / "agents"))
    monkeypatch.setenv("LD_PRELOAD", preload_path(installed()))
    program, out = simulator.build() / "counter", (tmp_path / "24", tmp_path / "1")
    ranks = "".join(f"{program} --port 0 --no-shm --mib {each.name} > {each} & " for each in out)
    with subprocess.Popen(["sh", "-c", ranks + "wait"], cwd=tmp_path, start_new_session=True) as job:
        monkeypatch.delenv("LD_PRELOAD")
        try:
            wait_until(lambda: all(r.exists() and r.read_text().startswith("ready") for r in out), "both of them")
            large, small = (int(re.findall(r"ready pid=(\d+)", each.read_text())[0]) for each in out)
            gpucr.suspend(job.pid, gpu_state="interposed", force=True)
            assert [driver.state(pid) for pid in (large, small)] == [CHECKPOINTED] * 2
            gpucr.resume(job.pid)
            assert [driver.state(pid) for pid in (large, small)] == [RUNNING] * 2
            os.kill(large, signal.SIGKILL)
            wait_until(lambda: large not in processes_in(tmp_path), "the large one to end")
            with pytest.raises(Unsupported, match=f"process {small} cannot leave by an interposer: it has no memory"):
                gpucr.suspend(job.pid, gpu_state="interposed")
            assert driver.state(small) is RUNNING
        finally:
            os.killpg(job.pid, signal.SIGKILL)


ONLY_A_STATE = """
import ctypes, time
assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
open("watches", "w").close()
while True: time.sleep(60)
"""
"""What NVML makes of a process, seen by the driver: a state, no agent, nothing on the GPU."""


def test_a_process_that_only_watches_does_not_block_the_others(
    driver: CudaDriver, sim_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCR_INTERPOSER_DIR", str(tmp_path / "agents"))
    job_of = 'LD_PRELOAD=$1 "$2" --port 0 --no-shm --mib 24 > worker & exec "$3" -c "$4"'
    program = str(simulator.build() / "counter")
    command = ["sh", "-c", job_of, "sh", preload_path(installed()), program, sys.executable, ONLY_A_STATE]
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True) as job:
        try:
            output = tmp_path / "worker"
            wait_until((tmp_path / "watches").exists, "the one that watches")
            wait_until(lambda: output.exists() and output.read_text().startswith("ready"), "the one that works")
            worker = int(output.read_text().split("pid=")[1].split()[0])
            for _ in range(2):
                gpucr.suspend(job.pid, gpu_state="interposed")
                assert [driver.state(pid) for pid in (worker, job.pid)] == [CHECKPOINTED] * 2
                gpucr.resume(job.pid)
                assert [driver.state(pid) for pid in (worker, job.pid)] == [RUNNING] * 2
            with pytest.raises(Unsupported, match=f"process {job.pid} cannot leave by an interposer: it was started"):
                gpucr.suspend(job.pid, gpu_state="interposed", only=True)
        finally:
            os.killpg(job.pid, signal.SIGKILL)


def test_memory_that_cannot_be_captured_is_not_suspended_another_way(
    counter: CounterFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--mib", "8")
    monkeypatch.setattr("gpucr.gpu_state.captured.CapturedStaging._file_to_capture", lambda self, meter: None)
    with pytest.raises(Unsupported, match=f"staging of process {job.pid} could not be captured") as caught:
        gpucr.suspend(job.pid, gpu_state="captured")
    assert caught.value.code == "GPUCR-GPU-STATE"
    assert_runs(job, driver)
    monkeypatch.setattr(capabilities, "can_checkpoint_processes", lambda: False)
    with pytest.raises(Unsupported, match="cannot be captured without root"):
        gpucr.suspend(job.pid, gpu_state="captured")
    assert_runs(job, driver)


def test_an_unknown_word(counter: CounterFactory) -> None:
    job = counter("--mib", "8")
    with pytest.raises(InvalidRequest, match="gpu_state is 'plain'"):
        gpucr.suspend(job.pid, gpu_state="plain")  # type: ignore[arg-type]


def test_an_agent_that_cannot_create_its_socket(counter: CounterFactory, driver: CudaDriver, tmp_path: Path) -> None:
    environment = {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(tmp_path / "not" / "there")}
    job = counter("--mib", "24", env=environment)
    with pytest.raises(Unsupported, match="cannot leave by an interposer: no call of CUDA has come to it"):
        gpucr.suspend(job.pid, gpu_state="interposed")
    assert_runs(job, driver)
    gpucr.suspend(job.pid)
    gpucr.resume(job.pid)
    assert_runs(job, driver)


@pytest.mark.parametrize(
    ("closed", "told"),
    [
        (Closed(1, 0, 77, "cuMemcpyDtoH_v2"), r"was in cuMemcpyDtoH_v2 \(thread 77\)"),
        (Closed(0, 1), "captured a stream"),
        (Closed(2, 0), "was inside the driver"),
    ],
)
def test_the_thread_that_holds_up_the_gate_is_reported(
    closed: Closed, told: str, interposed: Counter, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Agent, "close_gate", lambda self, wait_s: closed)
        with pytest.raises(LockTimeout, match=f"process {interposed.pid} still {told} when the time for its lock"):
            gpucr.suspend(interposed.pid, gpu_state="interposed", timeout_s=2)
    assert_runs(interposed, driver)
