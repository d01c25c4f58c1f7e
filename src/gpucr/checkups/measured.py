"""What the canaries showed of this machine when they last ran."""

from __future__ import annotations

from gpucr import preflight
from gpucr.canaries.results import CanaryOutcome, ProbeReport
from gpucr.checkups.checkup import Checkup, from_findings, ok
from gpucr.operations.probe import measurements_in

_ABOUT = "probe"


def check(report: ProbeReport | None) -> list[Checkup]:
    """``report``: None where there is no driver to measure."""
    if report is None:
        return []
    if not report.results:
        return [
            Checkup(
                _ABOUT,
                "unknown",
                "nothing was measured on this machine yet",
                report.problem or "no results for this driver, these GPUs and this kernel",
                "gpucr goes by rules on the safe side, and refuses jobs that might come back",
                "gpucr doctor --probe",
            )
        ]
    back = [result.name for result in report.results if result.outcome is CanaryOutcome.COMES_BACK]
    return from_findings(
        _ABOUT,
        preflight.check_basics(measurements_in(report)),
        ok(
            _ABOUT,
            f"{len(back)} of {len(report.results)} canaries come back",
            f"{', '.join(back)}; last measured on {max(result.measured_on for result in report.results)}",
        ),
    )
