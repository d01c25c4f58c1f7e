"""Results of the last canary run on this machine."""

from __future__ import annotations

from gpucr.checkups import catalogue
from gpucr.checkups.checkup import from_findings, ok
from gpucr.diagnosis import preflight
from gpucr.diagnosis.canaries.results import CanaryOutcome, CanaryResult, ProbeReport
from gpucr.diagnosis.preflight.findings import Finding, Severity
from gpucr.diagnosis.probe import measurements_in
from gpucr.quantities import counted

_ABOUT = "probe"

_NOT_BACK: dict[CanaryOutcome, tuple[Severity, str, str, str]] = {
    CanaryOutcome.LOST: (
        "warning",
        "a program with {} is lost by a checkpoint",
        "gpucr refuses jobs in which it can see this; others would be lost",
        "do not suspend or dump such jobs on this machine; `gpucr doctor --probe` measures again",
    ),
    CanaryOutcome.REFUSED: (
        "warning",
        "the driver refuses to checkpoint {}",
        "a suspend or dump of such a job fails, and the job keeps running",
        "change the program to do without it, or let it run to its end",
    ),
    CanaryOutcome.TIMED_OUT: (
        "unknown",
        "whether a program with {} comes back is not known",
        "gpucr goes by rules on the safe side",
        "gpucr doctor --probe --canary-timeout 300",
    ),
}
"""Without ``NOT_POSSIBLE``: the machine lacks the feature, so nothing can be lost."""


def check(report: ProbeReport | None) -> list[Finding]:
    """``report``: None if there is no driver to measure."""
    if report is None:
        return []
    if not report.results:
        return [catalogue.NOT_MEASURED.seen(report.problem or "no results for this driver, these GPUs and this kernel")]
    basics = from_findings(_ABOUT, preflight.check_basics(measurements_in(report)))
    others = [result for result in report.results if result.name not in preflight.BASICS]
    return [*basics, *map(_not_back, [r for r in others if r.outcome in _NOT_BACK]), *_back(report)]


def _back(report: ProbeReport) -> list[Finding]:
    back = [result for result in report.results if result.outcome is CanaryOutcome.COMES_BACK]
    if not back:
        return []
    what = f"{len(back)} of {counted(len(report.results), 'canary program')} came back"
    days = max(result.measured_on for result in back)
    return [ok(_ABOUT, what, f"{', '.join(result.name for result in back)}; last measured on {days}")]


def _not_back(result: CanaryResult) -> Finding:
    severity, what, consequence, remedy = _NOT_BACK[result.outcome]
    evidence = f"canary {result.name}, measured on {result.measured_on}: {result.outcome.value}"
    return Finding(severity, what.format(result.what), evidence, consequence, remedy, about=_ABOUT)
