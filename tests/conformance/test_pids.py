"""The driver's results for pids without CUDA, and gpucr's interpretation."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpucr.driver import libcuda
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import NotACudaProcess, NotPermitted, ProcessNotFound
from gpucr.model import CudaState
from tests.counter import CounterFactory

NO_SUCH_PID = 2**31 - 1  # beyond the kernel's largest pid_max


@pytest.mark.parametrize("pid", [NO_SUCH_PID, 0, -1])
def test_result_for_a_pid_that_does_not_exist(pid: int) -> None:
    cuda = libcuda.load()
    results = [cuda.process_state(pid)[0], cuda.restore_thread_id(pid)[0], cuda.lock(pid), cuda.unlock(pid)]
    assert results == [libcuda.OPERATING_SYSTEM] * 4


def test_result_for_a_process_without_cuda(process_without_cuda: int) -> None:
    cuda = libcuda.load()
    results = [
        cuda.process_state(process_without_cuda)[0],
        cuda.restore_thread_id(process_without_cuda)[0],
        cuda.lock(process_without_cuda),
    ]
    assert results == [libcuda.NOT_INITIALIZED] * 3


def test_no_state_without_cuda(driver: CudaDriver, process_without_cuda: int) -> None:
    assert driver.state(process_without_cuda) is None
    with pytest.raises(NotACudaProcess):
        driver.lock(process_without_cuda)


@pytest.mark.parametrize("pid", [NO_SUCH_PID, 0, -1, 2**40])
def test_missing_process(driver: CudaDriver, pid: int) -> None:
    with pytest.raises(ProcessNotFound):
        driver.state(pid)
    with pytest.raises(ProcessNotFound):
        driver.lock(pid)


def test_zombie(driver: CudaDriver) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessNotFound, match="zombie"):
            driver.state(process.pid)


def test_cuda_process_that_died(driver: CudaDriver, counter: CounterFactory) -> None:
    program = counter("--mib", "4")
    driver.lock(program.pid)
    program.kill()
    for act in (driver.checkpoint, driver.unlock):
        with pytest.raises(ProcessNotFound):
            act(program.pid)


def test_thread_id_stands_for_its_process(driver: CudaDriver, counter: CounterFactory) -> None:
    pid = counter("--mib", "4").pid
    driver.lock(pid)
    assert driver.state(driver.restore_thread_id(pid)) == CudaState.LOCKED


def test_thread_id_of_a_process_without_cuda(driver: CudaDriver) -> None:
    script = "import threading; threading.Thread(target=input).start(); print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        thread_ids = {int(name) for name in os.listdir(f"/proc/{process.pid}/task")} - {process.pid}
        assert [driver.state(thread_id) for thread_id in thread_ids] == [None]
        process.kill()


def test_another_users_process(counter: CounterFactory) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    pid = counter("--mib", "4").pid
    script = (
        "import os, sys\n"
        "from gpucr.driver.cuda import load_driver\n"
        "from gpucr.errors import NotPermitted\n"
        "driver = load_driver()\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try:\n"
        f"    driver.lock({pid})\n"
        "except NotPermitted as e:\n"
        "    print(e.pid)\n"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == str(pid)
    assert NotPermitted.exit_code == 2
