"""One line of what the doctor found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gpucr.diagnosis.preflight import Finding

Verdict = Literal["ok", "warning", "blocking", "unknown"]
"""``blocking``: an operation would be refused, or fail. ``unknown``: it could not be seen, or was not measured."""

RepairName = Literal["fetch-criu", "huge-pages-shared", "huge-pages-private"]
"""What `gpucr doctor --fix` can do (repairs.py)."""


@dataclass(frozen=True)
class Checkup:
    """What one check saw. ``about`` is the part of the machine or job; an ``ok`` has no consequence and no remedy.

    ``pid`` is None where it concerns the machine or the whole job. ``code`` is that of the refusal which it leads to,
    where it has one of its own. ``repair`` is what `gpucr doctor --fix` would do about it.
    """

    about: str
    verdict: Verdict
    what: str
    evidence: str
    consequence: str = ""
    remedy: str = ""
    pid: int | None = None
    code: str | None = None
    repair: RepairName | None = None

    def sentence(self) -> str:
        """What and evidence in one line."""
        return f"{self.what} ({self.evidence})" if self.evidence else self.what


def ok(about: str, what: str, evidence: str = "") -> Checkup:
    """Nothing stands in the way."""
    return Checkup(about, "ok", what, evidence)


def from_findings(about: str, findings: Iterable[Finding], otherwise: Checkup | None = None) -> list[Checkup]:
    """Preflight's findings as checkups; ``otherwise`` where there is none."""
    found = [
        Checkup(
            about,
            finding.severity,
            finding.what,
            finding.evidence,
            finding.consequence,
            finding.remedy,
            finding.pid,
            finding.code if finding.severity == "blocking" else None,
        )
        for finding in findings
    ]
    return found or ([otherwise] if otherwise is not None else [])
