"""Injected faults happen where and when they are asked for, and nowhere else."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.counter import CounterFactory, wait_until
from tests.sim.libcuda import CHECKPOINTED, FAILED, LOCKED, RUNNING, Libcuda


def test_result(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter(env={"GPUCR_SIM_FAULTS": "checkpoint=999"})
    assert libcuda.act("lock", program.pid) == 0
    assert libcuda.act("checkpoint", program.pid) == 999
    assert libcuda.state(program.pid) == (0, LOCKED)
    assert libcuda.act("unlock", program.pid) == 0
    assert program.ask() == 101


def test_only_the_nth_call(libcuda: Libcuda, counter: CounterFactory) -> None:
    pid = counter(env={"GPUCR_SIM_FAULTS": "restore#2=2,unlock#1=401"}).pid
    libcuda.act("lock", pid)
    assert libcuda.act("unlock", pid) == 401
    assert libcuda.act("checkpoint", pid) == 0
    assert libcuda.act("restore", pid) == 0
    assert libcuda.act("checkpoint", pid) == 0
    assert libcuda.act("restore", pid) == 2
    assert libcuda.state(pid) == (0, CHECKPOINTED)
    libcuda.resume(pid)


def test_failed_state(libcuda: Libcuda, counter: CounterFactory) -> None:
    pid = counter(env={"GPUCR_SIM_FAULTS": "restore=2:failed"}).pid
    libcuda.suspend(pid)
    assert libcuda.act("restore", pid) == 2
    assert libcuda.state(pid) == (0, FAILED)


@pytest.mark.parametrize("action", ["lock", "checkpoint", "restore", "unlock"])
def test_target_dies_in_the_middle(libcuda: Libcuda, counter: CounterFactory, action: str) -> None:
    program = counter("--mib", "2", env={"GPUCR_SIM_FAULTS": f"{action}=die"})
    for before in ("lock", "checkpoint", "restore", "unlock"):
        expected = 304 if before == action else 0
        assert libcuda.act(before, program.pid) == expected
        if before == action:
            break
    wait_until(lambda: not program.alive, "the target to die")  # the driver notices a moment earlier


def test_hang_lasts_until_the_target_is_killed(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter(env={"GPUCR_SIM_FAULTS": "checkpoint=hang"})
    assert libcuda.act("lock", program.pid) == 0
    results: list[int] = []
    caller = threading.Thread(target=lambda: results.append(libcuda.act("checkpoint", program.pid)))
    caller.start()
    caller.join(0.2)
    assert caller.is_alive()
    assert libcuda.state(program.pid) == (0, LOCKED)
    program.kill()
    caller.join(30)
    assert results == [304]


def test_delay_lengthens_the_action(libcuda: Libcuda, counter: CounterFactory) -> None:
    program = counter(env={"GPUCR_SIM_FAULTS": "lock=delay:400"})
    start = time.monotonic()
    assert libcuda.act("lock", program.pid) == 0
    assert time.monotonic() - start >= 0.4
    assert libcuda.state(program.pid) == (0, LOCKED)


@pytest.mark.parametrize("side", ["target", "caller"])
def test_an_action_can_wait_for_a_file(
    libcuda: Libcuda, counter: CounterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, side: str
) -> None:
    faults = f"lock=until:{tmp_path / 'go'}"
    if side == "caller":
        monkeypatch.setenv("GPUCR_SIM_CALLER_FAULTS", faults)
    program = counter(env={"GPUCR_SIM_FAULTS": faults} if side == "target" else None)
    results: list[int] = []
    caller = threading.Thread(target=lambda: results.append(libcuda.act("lock", program.pid)))
    caller.start()
    caller.join(0.2)
    assert caller.is_alive()
    assert libcuda.state(program.pid) == (0, RUNNING)
    (tmp_path / "go").touch()
    caller.join(30)
    assert results == [0]
    assert libcuda.state(program.pid) == (0, LOCKED)


def test_a_callers_fault_affects_one_pid(
    libcuda: Libcuda, counter: CounterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = counter().pid, counter().pid
    monkeypatch.setenv("GPUCR_SIM_CALLER_FAULTS", f"lock@{one}=999,state@{other}=800")
    assert libcuda.act("lock", one) == 999
    assert libcuda.act("lock", other) == 0
    assert libcuda.state(other) == (800, -1)
    assert libcuda.state(one) == (0, RUNNING)
    monkeypatch.delenv("GPUCR_SIM_CALLER_FAULTS")
    assert libcuda.state(other) == (0, LOCKED)


def test_a_callers_fault_can_kill_the_target(
    libcuda: Libcuda, counter: CounterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = counter()
    monkeypatch.setenv("GPUCR_SIM_CALLER_FAULTS", f"unlock@{program.pid}=die")
    assert libcuda.act("lock", program.pid) == 0
    assert libcuda.act("unlock", program.pid) == 304
    wait_until(lambda: not program.alive, "the target to die")


@pytest.mark.parametrize(
    "faults", ["explode=1", "lock", "lock=", "lock#0=1", "lock@x=1", "lock=delay:", "lock=until:", "lock=1x", ","]
)
def test_malformed_faults_are_refused(
    libcuda: Libcuda, counter: CounterFactory, monkeypatch: pytest.MonkeyPatch, faults: str
) -> None:
    pid = counter().pid
    monkeypatch.setenv("GPUCR_SIM_CALLER_FAULTS", faults)
    assert libcuda.act("lock", pid) == 999
    monkeypatch.delenv("GPUCR_SIM_CALLER_FAULTS")
    assert libcuda.state(pid) == (0, RUNNING)
