"""Measure what this machine can bring back, and keep it for the preflight of later operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec.structs import replace

from gpucr.diagnosis import preflight
from gpucr.diagnosis.canaries import store
from gpucr.diagnosis.canaries.prober import measure, this_machine
from gpucr.diagnosis.canaries.results import WHAT, CanaryOutcome, CanaryResult, ProbeReport
from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.errors import InvalidRequest
from gpucr.linux.private_folders import state_folder
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.operation import all_or_nothing

CANARY_TIMEOUT_S = 60.0
"""How long one canary may take. Two CUDA starts take seconds on a machine with many GPUs."""


def probe(
    only: Iterable[str] = (),
    *,
    canary_timeout_s: float = CANARY_TIMEOUT_S,
    on_result: Callable[[CanaryResult], None] | None = None,
    cancel: Cancellation | None = None,
) -> ProbeReport:
    """Checkpoint and restore small programs of gpucr's own, one after the other, and keep what became of them.

    ``only`` names some of the canaries; what was measured of the others before is kept. No other process is touched.
    Each canary takes some tens of MiB of device memory. Needs no privileges. Where the
    results cannot be kept, ``problem`` says why.

    Raises DriverUnavailable, InvalidRequest for a name that is no canary's or a time that cannot be meant, and
    Interrupted (a signal, ``cancel``): then no canary is left, and no result of this call is kept.
    """
    names = _chosen(tuple(only))
    if not 0 < canary_timeout_s < float("inf"):
        raise InvalidRequest(f"a canary cannot run for {canary_timeout_s} s", hint="give a number of seconds above 0")
    driver = load_driver()
    machine = this_machine(driver)
    measured: dict[str, CanaryResult] = {}
    with all_or_nothing("probe", ", ".join(names), cancel, state="no result is kept") as interrupts:
        for name in names:
            measured[name] = measure(driver, name, canary_timeout_s, interrupts.check)
            if on_result is not None:
                on_result(measured[name])
        interrupts.conclude()
        return _keep(ProbeReport(machine, (), None), measured)


def last_probe() -> ProbeReport:
    """What was measured on this machine before, with this driver, these GPUs and this kernel; perhaps nothing.

    Raises DriverUnavailable.
    """
    return _load(load_driver())


def measurements(driver: Driver | None) -> preflight.Measurements:
    """What preflight can rely on: of each canary that was measured here, whether it comes back."""
    return {} if driver is None else measurements_in(_load(driver))


def measurements_in(report: ProbeReport) -> preflight.Measurements:
    """What preflight can rely on of this report."""
    decided = {CanaryOutcome.COMES_BACK: True, CanaryOutcome.REFUSED: False, CanaryOutcome.LOST: False}
    return {
        result.name: preflight.Measurement(decided[result.outcome], result.outcome.value, result.measured_on)
        for result in report.results
        if result.outcome in decided
    }


def _chosen(only: tuple[str, ...]) -> tuple[str, ...]:
    for name in only:
        if name not in WHAT:
            raise InvalidRequest(f"there is no canary {name!r}", hint="the canaries are " + ", ".join(WHAT))
    return tuple(name for name in WHAT if not only or name in only)


def _folder() -> Path:
    return state_folder() / "probes"


def _load(driver: Driver) -> ProbeReport:
    machine = this_machine(driver)
    try:
        return store.load(machine, _folder())
    except OSError as e:  # no home folder
        return ProbeReport(machine, (), None, f"results cannot be kept: {e.strerror or e}")


def _keep(report: ProbeReport, measured: dict[str, CanaryResult]) -> ProbeReport:
    """The new results, and those from before of the canaries that did not run."""
    try:
        folder = _folder()
        before = {result.name: result for result in store.load(report.machine, folder).results}
        results = store.in_order(list({**before, **measured}.values()))
        report = replace(report, results=results)
        return replace(report, path=str(store.save(report, folder)))
    except OSError as e:
        results = report.results or store.in_order(list(measured.values()))
        return replace(report, results=results, problem=f"the results cannot be kept: {e.strerror or e}")
