"""Canaries are taken through a checkpoint, and their outcome shows what the driver does."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import gpucr
from gpucr import CanaryOutcome, gang
from gpucr.diagnosis import probe as operation
from gpucr.diagnosis.canaries import canary, interposed, prober
from gpucr.diagnosis.canaries.results import WHAT, CanaryResult
from gpucr.driver import gpus
from gpucr.driver.cuda import CudaDriver, load_driver
from gpucr.errors import BrokenInstall
from gpucr.interposer import library
from gpucr.interposer.client import Agent
from gpucr.interposer.protocol import Code, Operation, Refused
from gpucr.interposer.vault import VaultFailed
from gpucr.linux import processes
from tests.counter import processes_of_this_test, wait_until

pytestmark = pytest.mark.usefixtures("state_home")

COMES_BACK, REFUSED, LOST, NOT_POSSIBLE, TIMED_OUT = CanaryOutcome

LONG_S = 1800.0
"""For a canary that comes to an end by itself: on a busy machine its two starts of Python and CUDA take long."""


@pytest.fixture
def sim(sim_only: None, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The simulated machine, whose GPUs reach each other; a test sets what else it needs."""
    monkeypatch.setenv("GPUCR_SIM_PEERS", "1")
    return monkeypatch


def measure(driver: CudaDriver, name: str, timeout_s: float = LONG_S) -> CanaryResult:
    result = prober.measure(driver, name, timeout_s)
    assert no_canary_is_left()
    return result


def no_canary_is_left() -> bool:
    return not canaries()


def canaries() -> list[int]:
    """This test's canaries: other tests may run some at the same time."""
    return [pid for pid in processes_of_this_test() if is_canary(pid)]


def is_canary(pid: int) -> bool:
    """Whether it is one of this test's: other tests run canaries at the same time."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        environment = processes.environment(pid)
    except OSError:
        return False
    is_ours = environment is not None and environment.get("XDG_STATE_HOME") == os.environ["XDG_STATE_HOME"]
    stat = processes.read_stat(pid)
    return is_ours and b"gpucr.diagnosis.canaries.programs" in command and stat is not None and stat.status not in "ZX"


# --- the driver and the machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "outcomes"),
    [
        ("610", {"legacy_ipc": COMES_BACK, "vmm_export": LOST, "peer_access": LOST}),
        ("future", {"legacy_ipc": COMES_BACK, "vmm_export": COMES_BACK, "peer_access": COMES_BACK}),
    ],
)
def test_newer_drivers(
    driver: CudaDriver, sim: pytest.MonkeyPatch, generation: str, outcomes: dict[str, CanaryOutcome]
) -> None:
    sim.setenv("GPUCR_SIM_DRIVER", generation)
    assert {name: measure(driver, name).outcome for name in outcomes} == outcomes


def test_features_the_machine_lacks(driver: CudaDriver, sim: pytest.MonkeyPatch) -> None:
    sim.setenv("GPUCR_SIM_PEERS", "0")
    result = measure(driver, "peer_access")
    assert (result.outcome, result.detail) == (NOT_POSSIBLE, "needs GPUs that can reach each other's memory")
    sim.setenv("GPUCR_SIM_GPUS", "1GiB")
    assert measure(driver, "peer_access").detail == "needs 2 GPUs"


# --- an end before the end ---------------------------------------------------------------------------------------


def test_a_cancelled_probe_keeps_nothing(driver: CudaDriver, sim: pytest.MonkeyPatch) -> None:
    cancel, measured = gpucr.Cancellation(), list[str]()

    def cancel_after_the_first(result: CanaryResult) -> None:
        measured.append(result.name)
        cancel.cancel("the machine is wanted")

    with pytest.raises(gpucr.Interrupted, match=r"^the machine is wanted; no result is kept$"):
        gpucr.probe(canary_timeout_s=LONG_S, on_result=cancel_after_the_first, cancel=cancel)
    assert len(measured) == 1
    assert no_canary_is_left()
    assert gpucr.last_probe().results == ()


def test_cancelling_ends_a_stopped_canary(driver: CudaDriver, sim: pytest.MonkeyPatch) -> None:
    """It is stopped, and would be until it times out."""
    cancel, real = gpucr.Cancellation(), canary.Canary.wait_ready

    def stop_and_cancel(self: canary.Canary) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        cancel.cancel()
        real(self)

    sim.setattr(canary.Canary, "wait_ready", stop_and_cancel)
    with pytest.raises(gpucr.Interrupted, match=r"^cancelled; no result is kept$"):
        gpucr.probe(["plain"], canary_timeout_s=10_000, cancel=cancel)
    assert no_canary_is_left()


# --- what a driver can do to them -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "outcome", "action", "code"),
    [
        ("lock=999", REFUSED, "lock", 999),
        ("checkpoint=2", REFUSED, "checkpoint", 2),
        ("checkpoint=999:failed", LOST, "checkpoint", 999),
        ("restore=999", LOST, "restore", 999),
        ("unlock=999", LOST, "unlock", 999),
        ("checkpoint=die", LOST, "checkpoint", None),
        ("restore=die", LOST, "restore", None),
    ],
)
def test_faults_of_the_driver(
    driver: CudaDriver,
    sim: pytest.MonkeyPatch,
    faults: str,
    outcome: CanaryOutcome,
    action: str,
    code: int | None,
) -> None:
    sim.setenv("GPUCR_SIM_FAULTS", faults)
    result = measure(driver, "plain")
    assert (result.outcome, result.action) == (outcome, action)
    assert result.detail
    if code is not None:
        assert result.result == code


@pytest.mark.parametrize(
    ("call", "outcome", "action"),
    [("close_gate", REFUSED, "gate"), ("drop", LOST, "take out"), ("give_back", LOST, "give back")],
)
def test_an_interposer_that_refuses(
    driver: CudaDriver, sim: pytest.MonkeyPatch, call: str, outcome: CanaryOutcome, action: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Refused(Operation.DROP, Code.NO_MEMORY)

    sim.setattr(Agent, call, refuse)
    result = measure(driver, "interposer")
    assert (result.outcome, result.action) == (outcome, action)
    assert "no memory" in result.detail
    assert no_canary_is_left()


def test_without_an_interposer_it_is_not_possible(driver: CudaDriver, sim: pytest.MonkeyPatch) -> None:
    def broken() -> Path:
        raise BrokenInstall("there is no compiler", hint="install one", code="GPUCR-NO-INTERPOSER")

    sim.setattr(library, "installed", broken)
    result = measure(driver, "interposer")
    assert (result.outcome, result.detail) == (
        NOT_POSSIBLE, "the canary could not be started: there is no compiler",
    )  # fmt: skip


def test_a_vault_that_does_not_start(driver: CudaDriver, sim: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise VaultFailed("cuInit gave 2 in gpucr's own process")

    sim.setattr(interposed, "Vault", fail)
    result = measure(driver, "interposer")
    assert (result.outcome, result.detail) == (NOT_POSSIBLE, "cuInit gave 2 in gpucr's own process")
    assert no_canary_is_left()


@pytest.mark.root
@pytest.mark.parametrize(
    ("faults", "outcome", "action"),
    [("", COMES_BACK, None), ("checkpoint=801", REFUSED, "checkpoint"), ("restore=2", LOST, "restore"),
     ("complete#1=999", LOST, "checkpoint"), ("complete#2=999", LOST, "restore")],
)  # fmt: skip
def test_memory_in_custom_storage(
    driver: CudaDriver, sim: pytest.MonkeyPatch, faults: str, outcome: CanaryOutcome, action: str | None
) -> None:
    sim.setenv("GPUCR_SIM_DRIVER", "615")
    sim.setenv("GPUCR_SIM_FAULTS", faults)
    result = measure(driver, "custom_storage")
    assert (result.outcome, result.action) == (outcome, action), result.detail


@pytest.mark.root
def test_a_driver_without_custom_storage(driver: CudaDriver, sim: pytest.MonkeyPatch) -> None:
    result = measure(driver, "custom_storage")
    assert result.outcome is NOT_POSSIBLE
    assert "this driver has no custom storage" in result.detail


@pytest.mark.parametrize("faults", ["lock=hang", "checkpoint=hang", "restore=hang", "unlock=hang"])
def test_a_driver_call_that_hangs(driver: CudaDriver, sim: pytest.MonkeyPatch, faults: str) -> None:
    sim.setenv("GPUCR_SIM_FAULTS", faults)
    for timeout_s in (1.5, 6, 24, 96):  # on a busy machine the canary may only just have started
        result = measure(driver, "plain", timeout_s)
        assert result.outcome is TIMED_OUT
        if result.action is not None:
            break
    assert result.action == faults.partition("=")[0]


def test_one_process_of_a_pair_hangs(driver: CudaDriver, sim: pytest.MonkeyPatch) -> None:
    sim.setenv("GPUCR_SIM_FAULTS", "restore=hang")
    assert measure(driver, "shared_memory_ranks", timeout_s=2).outcome is TIMED_OUT


@pytest.mark.parametrize(
    ("owner", "name", "faults"),
    [(gang, "discover", ""), (canary.Canary, "ask", ""), (canary.Canary, "ask", "checkpoint=801")],
)
def test_the_time_limit_passes_between_two_actions(
    driver: CudaDriver, sim: pytest.MonkeyPatch, owner: object, name: str, faults: str
) -> None:
    """Then the canary is killed, and its later state says nothing about the driver."""
    sim.setenv("GPUCR_SIM_FAULTS", faults)
    real, is_late = getattr(owner, name), False

    def late(*arguments: object) -> object:
        nonlocal is_late
        wait_until(no_canary_is_left, "the canary to be killed")
        is_late = True
        for each in arguments:
            if isinstance(each, canary.Canary):
                each._deadline += 3600  # its end is seen before the clock is looked at
        return real(*arguments)

    sim.setattr(owner, name, late)
    for timeout_s in (1.5, 6, 24, 96):  # on a busy machine the canary may only just have started
        result = measure(driver, "plain", timeout_s)
        assert (result.outcome, result.action) == (TIMED_OUT, None) or not is_late, result
        if is_late:
            break
    assert is_late


def test_a_canary_never_becomes_ready(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "_BOOTSTRAP", "import signal; signal.pause()")
    result = measure(driver, "plain", timeout_s=0.5)
    assert (result.outcome, result.action) == (TIMED_OUT, None)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("raise SystemExit", "it ended before it was ready"),
        ("print('failed: cuInit gave 999', flush=True)", "cuInit gave 999"),
        ("print('ready', flush=True); input()", "the driver does not know it as a CUDA process"),
    ],
)
def test_a_canary_that_does_not_start(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch, program: str, says: str
) -> None:
    monkeypatch.setattr(canary, "_BOOTSTRAP", program)
    result = measure(driver, "plain")
    assert (result.outcome, result.detail) == (NOT_POSSIBLE, f"the canary could not be started: {says}")


def test_data_that_is_restored_wrong(driver: CudaDriver, sim: pytest.MonkeyPatch) -> None:
    """The program notices it, even if the driver does not."""
    spoil = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from gpucr.diagnosis.canaries.programs.single import Plain\n"
        "check, calls = Plain.check, []\n"
        "def spoiled(self):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 2: self.cuda.write(self._data, b'x')\n"
        "    check(self)\n"
        "Plain.check = spoiled\n"
    )
    sim.setattr(canary, "_BOOTSTRAP", spoil + canary._BOOTSTRAP)
    result = measure(driver, "plain")
    assert result.outcome is LOST
    assert "device memory does not hold what was written before the checkpoint" in result.detail


def test_a_killed_probe_leaves_no_canary(sim_only: None, tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os.environ["GPUCR_SIM_FAULTS"] = "checkpoint=hang"
        prober.measure(load_driver(), "shared_memory_ranks", 100)
        os._exit(0)
    wait_until(lambda: len(canaries()) == 2, "two processes")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_until(no_canary_is_left, "the canaries to end")


# --- probe and what it keeps ------------------------------------------------------------------------------------


def test_probe_measures_all_and_keeps_it(sim: pytest.MonkeyPatch, state_home: Path) -> None:
    told: list[str] = []
    report = gpucr.probe(canary_timeout_s=LONG_S, on_result=lambda result: told.append(result.name))
    assert told == list(WHAT) == [result.name for result in report.results]
    assert report.problem is None
    assert report.path is not None
    assert Path(report.path).parent == state_home / "gpucr" / "probes"
    assert report.machine.driver == gpus.driver_version()
    assert gpucr.last_probe() == report


def test_one_canary_can_be_measured_again_alone(sim: pytest.MonkeyPatch) -> None:
    first = gpucr.probe(["plain"], canary_timeout_s=LONG_S)
    assert [result.name for result in first.results] == ["plain"]
    second = gpucr.probe(["managed"], canary_timeout_s=LONG_S)
    assert [result.name for result in second.results] == ["plain", "managed"]
    assert second.results[0] == first.results[0]
    sim.setenv("GPUCR_SIM_FAULTS", "restore=999")
    assert [result.outcome for result in gpucr.probe(["plain"], canary_timeout_s=LONG_S).results] == [LOST, REFUSED]


def test_another_driver_has_no_results(sim: pytest.MonkeyPatch) -> None:
    gpucr.probe(["plain"], canary_timeout_s=LONG_S)
    sim.setenv("GPUCR_SIM_DRIVER", "610")
    assert gpucr.last_probe().results == ()


def test_results_that_cannot_be_kept(sim: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    report = gpucr.probe(["plain"], canary_timeout_s=LONG_S)
    assert [result.outcome for result in report.results] == [COMES_BACK]
    assert report.path is None
    assert report.problem is not None
    assert "cannot be kept" in report.problem


@pytest.mark.parametrize("time_s", [0, -1, float("inf"), float("nan")])
def test_an_invalid_time_limit(time_s: float) -> None:
    with pytest.raises(gpucr.InvalidRequest, match="cannot run for"):
        gpucr.probe(canary_timeout_s=time_s)


def test_an_unknown_canary() -> None:
    with pytest.raises(gpucr.InvalidRequest, match="no canary 'parrot'"):
        gpucr.probe(["parrot"])


def test_results_preflight_can_use(sim: pytest.MonkeyPatch, driver: CudaDriver) -> None:
    assert operation.measurements(driver) == {}
    assert operation.measurements(None) == {}
    gpucr.probe(["plain", "peer_access", "managed"], canary_timeout_s=LONG_S)
    sim.setenv("GPUCR_SIM_FAULTS", "lock=hang")
    gpucr.probe(["pinned"], canary_timeout_s=1)
    known = {name: one.comes_back for name, one in operation.measurements(driver).items()}
    assert known == {"plain": True, "peer_access": False, "managed": False}, "a time-out decides nothing"
