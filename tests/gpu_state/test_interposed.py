"""Jobs that run under the interposer: suspend and resume on the simulator."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.driver.gpus import list_gpus
from gpucr.errors import InterposerError, Unsupported
from gpucr.gpu_state.interposed.coming_back import bring_back, take_out_again
from gpucr.gpu_state.interposed.line import Line
from gpucr.interposer import client
from gpucr.interposer.client import Agent
from gpucr.interposer.library import installed, preload_path
from gpucr.interposer.protocol import DRIVER_ERROR, Answer, BadAnswer, Code, Kept, Operation, Refused
from gpucr.interposer.vault import Vault, VaultFailed, Vaults
from gpucr.model import CudaState
from tests.counter import Counter, CounterFactory
from tests.ranks import RanksFactory
from tests.storm import later

pytestmark = pytest.mark.in_turn

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED
MIB = 1 << 20


@pytest.fixture
def job(counter: CounterFactory, sim_only: None, tmp_path: Path) -> Counter:
    """A counter whose device memory can leave it."""
    environment = {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(tmp_path / "agents")}
    return counter("--mib", "24", env=environment)


def blocks_of(pid: int) -> tuple[int, int, int]:
    """How many blocks it has, how many of them are away, and whether its gate is closed."""
    line = Line(pid)
    try:
        status = line.agent.status()
        return status.blocks, status.away, status.gate_closed
    finally:
        line.hang_up()


def test_suspend_and_resume(job: Counter, driver: CudaDriver) -> None:
    before = blocks_of(job.pid)
    assert before[0] > 0
    for count in (101, 102):
        gpucr.suspend(job.pid)
        assert driver.state(job.pid) is CHECKPOINTED
        assert blocks_of(job.pid) == (before[0], before[0], 1)
        gpucr.resume(job.pid)
        assert driver.state(job.pid) is RUNNING
        assert blocks_of(job.pid) == before
        assert job.send("verify") == "ok"
        assert job.ask() == count


def test_a_failed_resume_leaves_the_job_suspended(
    job: Counter, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpucr.suspend(job.pid)
    monkeypatch.setattr(Agent, "fetch", lambda self, what=Kept.MEMORY: None)
    with pytest.raises(InterposerError, match="is away, and nobody has it") as caught:
        gpucr.resume(job.pid)
    assert caught.value.code == "GPUCR-INTERPOSER"
    assert driver.state(job.pid) is CHECKPOINTED
    monkeypatch.undo()
    gpucr.resume(job.pid)
    assert driver.state(job.pid) is RUNNING
    assert job.send("verify") == "ok"
    assert job.ask() == 101


def test_partly_filled_memory_is_not_taken_as_complete(
    job: Counter, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recreated memory is present, but the old content is kept, and the gate closed, until it is all filled."""
    gpucr.suspend(job.pid)

    def fail(self: Vault, *_: object) -> None:
        raise VaultFailed("the GPU fell off the bus")

    monkeypatch.setattr(Vault, "write", fail)
    driver.restore(job.pid, None)
    line, vaults = Line(job.pid), Vaults()
    with pytest.raises(VaultFailed):
        bring_back(driver, line, [gpu.uuid for gpu in list_gpus()], vaults)
    line.hang_up()
    vaults.close()
    blocks, away, gate_closed = blocks_of(job.pid)
    assert (blocks > 0, away, gate_closed) == (True, 0, 1)
    take_out_again(driver, job.pid)
    driver.checkpoint(job.pid)
    with pytest.raises(VaultFailed):
        gpucr.resume(job.pid)
    assert driver.state(job.pid) is CHECKPOINTED
    assert blocks_of(job.pid) == (blocks, blocks, 1)
    monkeypatch.undo()
    gpucr.resume(job.pid)
    assert job.send("verify") == "ok"
    assert job.ask() == 101


def test_an_agent_that_does_not_answer_is_not_used(
    job: Counter, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Agent) -> object:
        raise Refused(Operation.LIST, Code.NO_DESCRIPTORS)

    monkeypatch.setattr(Agent, "blocks", refuse)
    with pytest.raises(Unsupported, match=r"did not tell what it has: .*no descriptors"):
        gpucr.suspend(job.pid, gpu_state="interposed")
    assert driver.state(job.pid) is RUNNING
    assert gpucr.suspend(job.pid).processes[0].now is CHECKPOINTED
    monkeypatch.undo()
    assert blocks_of(job.pid)[1:] == (0, 0)  # the driver has taken them
    gpucr.resume(job.pid)
    assert job.send("verify") == "ok"


def test_partly_dropped_memory_is_restored(job: Counter, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver fails midway through a drop: some memory is then only in gpucr's descriptors."""
    real = Agent.drop

    def half_way(self: Agent, **options: bool) -> None:
        real(self, **options)
        raise Refused(Operation.DROP, DRIVER_ERROR + 999)

    monkeypatch.setattr(Agent, "drop", half_way)
    with pytest.raises(InterposerError, match=r"did not let its memory go: .*the driver's result was 999"):
        gpucr.suspend(job.pid, gpu_state="interposed")
    monkeypatch.undo()
    assert driver.state(job.pid) is RUNNING
    assert blocks_of(job.pid)[1:] == (0, 0)
    assert job.send("verify") == "ok"
    assert job.ask() == 101


@pytest.mark.parametrize("lie", [
    {"location": 7}, {"location": -1}, {"size_bytes": 5000}, {"size_bytes": 1 << 60},
])  # fmt: skip
def test_an_agent_with_invalid_answers_is_not_used(
    lie: dict[str, int], job: Counter, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent may be any program that a user wrote."""
    real = Agent._receive

    def lying(self: Agent, operation: Operation) -> tuple[Answer, list[int]]:
        answer, descriptors = real(self, operation)
        if operation is Operation.LIST:
            records = b"".join(replace(each, **lie).pack() for each in real_blocks(answer))
            answer = replace(answer, payload=records)
        return answer, descriptors

    real_blocks = Answer.blocks
    monkeypatch.setattr(Agent, "_receive", lying)
    with pytest.raises(Unsupported, match="did not tell what it has: the agent has"):
        gpucr.suspend(job.pid, gpu_state="interposed")
    monkeypatch.undo()
    assert driver.state(job.pid) is RUNNING
    assert blocks_of(job.pid)[1:] == (0, 0)
    assert job.send("verify") == "ok"


@pytest.mark.parametrize("operation", [Operation.LIST, Operation.EXPORT])
def test_an_endless_list_is_abandoned(operation: Operation, job: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_BLOCKS", 1000)
    real = Agent._receive

    def endless(self: Agent, asked: Operation) -> tuple[Answer, list[int]]:
        answer, descriptors = real(self, asked)
        return (replace(answer, b=0) if asked is operation else answer), descriptors

    with Agent(job.pid) as agent:
        agent.close_gate(1.0)
        monkeypatch.setattr(Agent, "_receive", endless)
        with pytest.raises(BadAnswer):
            ask_all(agent, operation)


def ask_all(agent: Agent, operation: Operation) -> None:
    """For everything that it has."""
    if operation is Operation.LIST:
        agent.blocks()
        return
    for batch in agent.export():
        for each in batch:
            each.close()


@pytest.mark.parametrize("fails", ["export", "drop", "keep"])
def test_a_failed_suspend_leaves_the_job_running(
    fails: str, job: Counter, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(Agent, fails)

    def refuse(self: Agent, *arguments: object, **more: object) -> object:
        if arguments == (None,):
            return real(self, None)  # nothing is kept any more, which is a part of the undo
        raise Refused(Operation.EXPORT, Code.NO_DESCRIPTORS)

    monkeypatch.setattr(Agent, fails, refuse)
    with pytest.raises(InterposerError, match=f"interposer of process {job.pid} did not .*no descriptors"):
        gpucr.suspend(job.pid, gpu_state="interposed")
    monkeypatch.undo()
    assert driver.state(job.pid) is RUNNING
    assert blocks_of(job.pid)[1:] == (0, 0)
    assert job.send("verify") == "ok"
    assert job.ask() == 101


def test_a_job_left_midway_is_resumed(job: Counter, driver: CudaDriver) -> None:
    """Another tool has restored it through the driver: its memory is still away, and its gate closed."""
    gpucr.suspend(job.pid)
    driver.restore(job.pid, None)
    driver.unlock(job.pid)
    assert blocks_of(job.pid)[2] == 1
    gpucr.resume(job.pid)
    assert blocks_of(job.pid)[1:] == (0, 0)
    assert job.send("verify") == "ok"
    assert job.ask() == 101


@pytest.mark.parametrize("call", [later("close_gate"), "drop", later("keep")])
def test_a_process_that_dies_midway_is_reported_and_the_others_survive(
    call: str, counter: CounterFactory, driver: CudaDriver, tmp_path: Path, sim_only: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    variables = {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(tmp_path / "agents")}
    job = counter("--mib", "24", "--fork", "2", env=variables)
    pids = job.processes()
    real = getattr(Agent, call)

    def die(self: Agent, *arguments: object, **options: object) -> object:
        if self.pid == pids[-1]:
            os.kill(self.pid, signal.SIGKILL)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Agent, call, die)
    with pytest.raises(gpucr.GpucrError, match=str(pids[-1])):
        gpucr.suspend(job.pid)
    monkeypatch.undo()
    for pid in pids[:-1]:
        assert driver.state(pid) is RUNNING
        assert blocks_of(pid)[1:] == (0, 0)


@pytest.mark.parametrize("count", [3, later(8)])
def test_ranks_that_wait_for_each_other(count: int, ranks: RanksFactory, driver: CudaDriver, tmp_path: Path) -> None:
    """Gate and lock are one rung: no gate stays closed while another rank waits for work it has not submitted."""
    variables = {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(tmp_path / "agents")}
    job = ranks(count, "--mib", "4", "--step-us", "2000", env=variables)
    for _ in range(2):
        report = gpucr.suspend(job.pid, gpu_state="interposed", timeout_s=30.0)
        assert report.lock is not None
        assert report.lock.processes == count
        assert {driver.state(pid) for pid in job.ranks} == {CHECKPOINTED}
        assert all(blocks_of(pid)[1] > 0 for pid in job.ranks)
        gpucr.resume(job.pid)
        job.assert_goes_on()
