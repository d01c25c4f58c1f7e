"""Peer access in one process: the driver's stays in use, so that its canary decides, and runs when it is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpucr
from gpucr.diagnosis import probe
from gpucr.driver.cuda import CudaDriver
from gpucr.model import CudaState
from gpucr.operations.gpu_jobs import findings_of
from tests.interposer.conftest import Start
from tests.interposer.test_allocations import Run

PEERS = """
contexts = [context(0), context(1)]
own = allocate(4 * MIB)
small = allocate(1000)
assert cuda.cuCtxEnablePeerAccess(contexts[0], 0) == 0
assert cuda.cuCtxSetCurrent(contexts[0]) == 0
memory = allocate(4 * MIB)
stop()
"""


@pytest.fixture(autouse=True)
def machine_with_peers(sim_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's machine, since gpucr runs in it."""
    monkeypatch.setenv("GPUCR_SIM_PEERS", "1")


@pytest.fixture
def peers(start: Start, state_home: Path) -> Run:
    run = Run(start, PEERS)
    assert run.line() == "ready"
    return run


def measured() -> dict[str, str]:
    return {each.name: each.outcome.value for each in gpucr.last_probe().results}


def test_where_it_comes_back_nobody_has_to_measure(
    peers: Run, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCR_SIM_DRIVER", "future")  # the program's is 580
    assert measured() == {}
    (outlook,) = gpucr.plan_suspend([peers.pid])
    assert not outlook.is_refused
    assert measured() == {"peer_access": "comes back"}
    monkeypatch.setattr(probe, "measure", None)  # once is enough
    gpucr.suspend(peers.pid)
    assert driver.state(peers.pid) is CudaState.CHECKPOINTED
    gpucr.resume(peers.pid)
    peers.go_on()
    assert peers.process.wait(20) == 0


def test_where_it_does_not_the_job_is_refused(peers: Run, driver: CudaDriver) -> None:
    with pytest.raises(
        gpucr.Unsupported, match=r"peer access between its GPUs enabled .*peer_access measured .*: lost"
    ):
        gpucr.suspend(peers.pid)
    assert measured() == {"peer_access": "lost"}
    assert driver.state(peers.pid) is CudaState.RUNNING


def test_a_canary_that_could_not_decide_does_not_run_at_each_operation(
    peers: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "CANARY_TIMEOUT_S", 0.0)
    for _ in range(2):
        (outlook,) = gpucr.plan_suspend([peers.pid])
        assert [each.code for each in outlook.findings if each.severity == "blocking"] == ["GPUCR-PEER-ACCESS"]
        assert measured() == {"peer_access": "timed out"}
        monkeypatch.setattr(probe, "measure", None)


@pytest.mark.parametrize("room", [False, True])
def test_nothing_is_measured_on_full_gpus_nor_by_a_monitor(
    peers: Run, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if room:
        found = findings_of(peers.pid)
    else:
        monkeypatch.setattr(probe, "_ROOM_BYTES", 1 << 50)
        (outlook,) = gpucr.plan_suspend([peers.pid])
        found = outlook.findings
    assert [each.code for each in found if "doctor --probe" in each.evidence] == ["GPUCR-PEER-ACCESS"]
    assert measured() == {}


def test_a_job_without_peer_access_measures_nothing(start: Start, state_home: Path) -> None:
    run = Run(start, "memory = allocate(4 * MIB)\nstop()\n")
    assert run.line() == "ready"
    assert not gpucr.plan_suspend([run.pid])[0].is_refused
    assert measured() == {}
