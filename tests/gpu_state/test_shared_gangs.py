"""Gangs whose processes share device memory, under the interposer: suspended, resumed and frozen as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import InterposerError, JobChanged, Unsupported
from gpucr.interposer.client import Agent
from gpucr.interposer.protocol import Code, Operation, Refused
from gpucr.linux import processes
from gpucr.model import CudaState
from tests.conftest import MakeMachine
from tests.counter import wait_until
from tests.gpu_state.shared_gangs import SharingGang
from tests.gpu_state.test_interposed_killed import KILLER, wait_for_guard
from tests.sharing_programs import EXPORTER, FORWARDER, IMPORTER, OPENER, OWNER
from tests.storm import sample

pytestmark = pytest.mark.in_turn

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED
StartGang = Callable[..., SharingGang]


@pytest.fixture
def start(sim_only: None, state_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartGang]:
    """Start programs as one job; they are killed at the end."""
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1")
    with ExitStack() as opened:
        agents = opened.enter_context(tempfile.TemporaryDirectory(prefix="agents-"))

        def begin(*sources: str, **options: object) -> SharingGang:
            gang = SharingGang(sources, f"{agents}/a", **options)  # type: ignore[arg-type]
            opened.callback(gang.close)
            return gang

        yield begin


def states(gang: SharingGang, driver: CudaDriver) -> set[CudaState | None]:
    return {driver.state(pid) for pid in gang.pids}


def assert_as_found(gang: SharingGang, driver: CudaDriver) -> None:
    """Assert that they run with all their memory, and that nothing is kept."""
    assert states(gang, driver) == {RUNNING}
    for pid in gang.pids:
        with Agent(pid) as agent:
            status = agent.status()
            assert (status.away, status.stuck, status.gate_closed) == (0, 0, 0)


def assert_shares(gang: SharingGang) -> None:
    """Assert that each reads what the other writes."""
    first, *others = gang.processes
    assert first.say("write").endswith("100")
    for each in others:
        assert each.say("read").endswith("100")
    assert others[-1].say("write").startswith("200")
    for each in gang.processes:
        assert each.say("read") == "200 100"


HOST_NODE = "create(2 * MIB, 3)"


@pytest.mark.parametrize("exporter", [EXPORTER, EXPORTER.replace("create(2 * MIB)", HOST_NODE)], ids=["gpu", "host"])
def test_blocks_shared_by_descriptor(exporter: str, start: StartGang, driver: CudaDriver) -> None:
    gang = start(exporter, IMPORTER)
    for _ in range(2):
        gpucr.suspend(gang.pid, gpu_state="interposed")
        assert states(gang, driver) == {CHECKPOINTED}
        gpucr.resume(gang.pid)
        assert_as_found(gang, driver)
        assert_shares(gang)


def test_a_block_passed_on_by_an_importer(start: StartGang, driver: CudaDriver) -> None:
    gang = start(EXPORTER, FORWARDER, IMPORTER)
    gpucr.suspend(gang.pid)
    gpucr.resume(gang.pid)
    assert_as_found(gang, driver)
    assert_shares(gang)


def test_legacy_ipc(start: StartGang, driver: CudaDriver) -> None:
    gang = start(OWNER, OPENER)
    owner, opener = gang.processes
    for _ in range(2):
        gpucr.suspend(gang.pid)
        gpucr.resume(gang.pid)
        assert_as_found(gang, driver)
        assert (opener.say("write"), owner.say("read")) == ("42", "42")
    assert opener.say("close") == "0 0 1"
    gpucr.suspend(gang.pid)
    gpucr.resume(gang.pid)
    assert owner.say("read") == "42"


def test_a_fork_after_sharing_changes_nothing(start: StartGang, driver: CudaDriver) -> None:
    gang = start(OWNER, OPENER)
    owner, opener = gang.processes
    gpucr.suspend(gang.pid)
    gpucr.resume(gang.pid)
    assert owner.say("fork") == "inherited 0"
    gpucr.suspend(gang.pid)
    gpucr.resume(gang.pid)
    assert (opener.say("write"), owner.say("read")) == ("42", "42")


def test_a_frozen_gang_is_thawed(start: StartGang, driver: CudaDriver) -> None:
    gang = start(EXPORTER, IMPORTER)
    with gpucr.freeze(gang.pid, gpu_state="interposed"):
        pass
    assert_as_found(gang, driver)
    assert_shares(gang)


def test_a_sharing_gang_is_moved(machine: MakeMachine, start: StartGang, driver: CudaDriver) -> None:
    here, there = machine("2x1GiB")
    gang = start(EXPORTER, IMPORTER)
    for old, new in ((here, there), (there, here)):
        report = gpucr.move(gang.pid, gpu_map=f"{old}={new},{new}={old}")
        assert report.gpu_map is not None
        assert_as_found(gang, driver)
        assert_shares(gang)


# --- what would be torn apart -----------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("job", [0, 1], ids=["the owner alone", "the importer alone"])
def test_a_block_shared_outside_the_job(job: int, force: bool, start: StartGang, driver: CudaDriver) -> None:
    gang = start(EXPORTER, IMPORTER, roots=[0, 1])
    if job == 0 and force:
        return  # an importer in another tree shows nowhere: what is named has to be the whole job
    with pytest.raises(Unsupported, match=f"process {gang.pids[1]} ") as caught:
        gpucr.suspend(gang.roots[1], force=force)
    assert caught.value.code == "GPUCR-CUDA-IPC"
    assert_as_found(gang, driver)
    assert_shares(gang)


@pytest.mark.parametrize("plain", [0, 1], ids=["owner", "importer"])
def test_a_member_without_an_interposer(plain: int, start: StartGang, driver: CudaDriver) -> None:
    gang = start(EXPORTER, IMPORTER, plain=[plain])
    with pytest.raises(Unsupported) as caught:
        gpucr.suspend(gang.pid, force=True)
    assert caught.value.code == "GPUCR-CUDA-IPC"
    assert str(gang.pids[1 - plain]) in caught.value.message
    assert states(gang, driver) == {RUNNING}
    assert_shares(gang)


# --- what goes wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", sample(["fetch", "export", "drop", "drop_imported", "give_back", "keep"], 5))
def test_an_agents_refusal_in_a_suspend_leaves_the_gang_running(
    call: str, start: StartGang, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang = start(EXPORTER, IMPORTER)
    refuse_once(call, gang.pids[1], monkeypatch)
    with pytest.raises((InterposerError, gpucr.JobDamaged)) if call not in UNUSED else ExitStack():
        gpucr.suspend(gang.pid, gpu_state="interposed")
    monkeypatch.undo()
    if call in UNUSED:
        gpucr.resume(gang.pid)
    assert_as_found(gang, driver)
    assert_shares(gang)


UNUSED = ("fetch", "drop_imported", "give_back")
"""What a suspend that goes well does not ask for."""


@pytest.mark.parametrize("call", sample(["blocks", "fetch", "export", "drop_imported", "give_back", "keep"], 5))
def test_an_agents_refusal_in_a_resume_leaves_it_to_the_next(
    call: str, start: StartGang, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang = start(EXPORTER, IMPORTER)
    gpucr.suspend(gang.pid)
    refuse_once(call, gang.pids[1 if call != "export" else 0], monkeypatch)
    with pytest.raises(gpucr.GpucrError):
        gpucr.resume(gang.pid)
    monkeypatch.undo()
    assert states(gang, driver) == {RUNNING if call == "keep" else CHECKPOINTED}, "the first one continues before that"
    gpucr.resume(gang.pid)
    assert_as_found(gang, driver)
    assert_shares(gang)


def refuse_once(call: str, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent of this process does not do it the first time, but for what the vault asks for beside the driver."""
    real, refused = getattr(Agent, call), list[str]()

    def refuse(self: Agent, *arguments: object, **options: object) -> object:
        if self.pid == pid and not refused and threading.current_thread().name != "vault":
            refused.append(call)
            raise Refused(Operation.LIST, Code.NO_DESCRIPTORS)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Agent, call, refuse)


@pytest.mark.parametrize("dies", [0, 1], ids=["owner", "importer"])
def test_a_member_dies_while_the_others_are_stopped(
    dies: int, start: StartGang, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpucr still holds the memory of an owner that has ended: importers continue with it."""
    gang = start(EXPORTER, IMPORTER)
    real = CudaDriver.checkpoint

    def die(self: CudaDriver, pid: int) -> None:
        if pid == gang.pids[dies]:
            os.kill(pid, signal.SIGKILL)
        real(self, pid)

    monkeypatch.setattr(CudaDriver, "checkpoint", die)
    with pytest.raises((JobChanged, gpucr.JobDamaged), match=f"process {gang.pids[dies]} ended"):
        gpucr.suspend(gang.pid)
    monkeypatch.undo()
    left = gang.processes[1 - dies]
    assert driver.state(left.pid) is RUNNING
    assert left.say("read") == "7 8"


def test_an_owner_that_ended_while_it_was_suspended(start: StartGang, driver: CudaDriver) -> None:
    gang = start(EXPORTER, IMPORTER)
    gpucr.suspend(gang.pid)
    os.kill(gang.pids[0], signal.SIGKILL)
    wait_until(lambda: processes.read_stat(gang.pids[0]) is None, "it to end")
    with pytest.raises(JobChanged, match=f"process {gang.pids[0]} ended, and process {gang.pids[1]} has"):
        gpucr.resume(gang.pid)
    assert driver.state(gang.pids[1]) is CHECKPOINTED


# --- gpucr is killed --------------------------------------------------------------------------------------------


def killed(when: str, call: str, operation: str, pid: int, nth: int = 1) -> None:
    source = KILLER.replace("def killed(", f"left = [{nth}]\ndef killed(").replace(
        "    os.kill(os.getpid()",
        "    left[0] -= 1\n    if left[0]:\n        return result if when == 'after' else real(*arguments, **options)\n"
        "    os.kill(os.getpid()",
    )
    done = subprocess.run(
        [sys.executable, "-c", source, when, *call.split("."), operation, str(pid)],
        check=False, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


IN_A_SUSPEND = [
    ("after", "agent.keep", 1), ("after", "agent.keep", 2), ("after", "agent.export", 1),
    ("before", "agent.drop", 1), ("after", "agent.drop", 1), ("before", "agent.drop", 2),
    ("after", "agent.drop", 2),
    ("before", "driver.checkpoint", 1), ("after", "driver.checkpoint", 2), ("before", "agent.keep", 3),
    ("after", "agent.keep", 3), ("after", "agent.keep", 4),
]  # fmt: skip


@pytest.mark.parametrize(("when", "call", "nth"), sample(IN_A_SUSPEND, 15))
def test_gpucr_is_killed_in_a_suspend(when: str, call: str, nth: int, start: StartGang, driver: CudaDriver) -> None:
    gang = start(EXPORTER, IMPORTER)
    killed(when, call, "suspend", gang.pid, nth)
    wait_for_guard(gang.pids)
    assert_as_found(gang, driver)
    assert_shares(gang)
    gpucr.suspend(gang.pid, gpu_state="interposed")
    gpucr.resume(gang.pid)
    assert_shares(gang)


IN_A_RESUME = [
    ("after", "driver.restore", 1), ("before", "agent.give_back", 1), ("after", "agent.give_back", 1),
    ("after", "agent.drop_imported", 1), ("before", "agent.give_back", 2), ("after", "agent.give_back", 2),
    ("before", "agent.keep", 1), ("after", "agent.keep", 1), ("after", "agent.keep", 2),
    ("before", "driver.unlock", 1), ("after", "driver.unlock", 1),
]  # fmt: skip


@pytest.mark.parametrize(("when", "call", "nth"), sample(IN_A_RESUME, 15))
def test_gpucr_is_killed_in_a_resume(when: str, call: str, nth: int, start: StartGang, driver: CudaDriver) -> None:
    gang = start(EXPORTER, IMPORTER)
    gpucr.suspend(gang.pid)
    killed(when, call, "resume", gang.pid, nth)
    wait_for_guard(gang.pids)
    gpucr.resume(gang.pid)
    assert_as_found(gang, driver)
    assert_shares(gang)
