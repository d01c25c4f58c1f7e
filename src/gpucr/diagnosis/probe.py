"""Measure what this machine can bring back, and store it for later preflights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec.structs import replace

from gpucr.diagnosis import preflight
from gpucr.diagnosis.canaries import store
from gpucr.diagnosis.canaries.prober import measure, this_machine
from gpucr.diagnosis.canaries.results import WHAT, CanaryOutcome, CanaryResult, ProbeReport
from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.driver.gpus import list_gpus, visible_gpus
from gpucr.errors import InvalidRequest
from gpucr.linux.private_folders import state_folder
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.operation import all_or_nothing

_ROOM_BYTES = 4 << 30
"""Several times what a canary takes: its CUDA context is most of it, 530 MiB on an H200."""
CANARY_TIMEOUT_S = 60.0
"""How long one canary may take. Two CUDA starts take seconds on a machine with many GPUs."""


def probe(
    only: Iterable[str] = (),
    *,
    canary_timeout_s: float = CANARY_TIMEOUT_S,
    on_result: Callable[[CanaryResult], None] | None = None,
    cancel: Cancellation | None = None,
) -> ProbeReport:
    """Checkpoint and restore gpucr's own small programs, one after the other, and store the results.

    ``only`` names some of the canaries; earlier results of the others are kept. No other process is touched. Each
    canary takes some tens of MiB of device memory. Needs no privileges. If the results cannot be stored, ``problem``
    says why.

    Raises DriverUnavailable, InvalidRequest for an unknown canary or an invalid time, and Interrupted (a signal,
    ``cancel``): then no canary is left, and this call's results are discarded.
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
    """Earlier results for this machine, driver, GPUs and kernel; may be empty.

    Raises DriverUnavailable.
    """
    return _load(load_driver())


def measurements(driver: Driver | None) -> preflight.Measurements:
    """For preflight: whether each measured canary comes back."""
    return {} if driver is None else measurements_in(_load(driver))


def measurements_with(names: Iterable[str], driver: Driver) -> preflight.Measurements:
    """`measurements`, after running those of these canaries that never ran here. They take seconds.

    One that could not decide runs again only by `probe`: it would delay each operation. None runs where a GPU is nearly
    full: its memory could be what a program needs next.
    """
    before = _load(driver)
    new = set(names) - {result.name for result in before.results}
    free = [gpu.memory_free_bytes for gpu in visible_gpus(list_gpus(), os.environ)]
    if not new or min(free, default=0) < _ROOM_BYTES:
        return measurements_in(before)
    measured = {name: measure(driver, name, CANARY_TIMEOUT_S) for name in sorted(new)}
    return measurements_in(_keep(ProbeReport(this_machine(driver), (), None), measured))


def measurements_in(report: ProbeReport) -> preflight.Measurements:
    """The report's results for preflight."""
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
    """The new results, plus earlier ones of the canaries that did not run."""
    try:
        folder = _folder()
        before = {result.name: result for result in store.load(report.machine, folder).results}
        results = store.in_order(list({**before, **measured}.values()))
        report = replace(report, results=results)
        return replace(report, path=str(store.save(report, folder)))
    except OSError as e:
        results = report.results or store.in_order(list(measured.values()))
        return replace(report, results=results, problem=f"the results cannot be kept: {e.strerror or e}")
