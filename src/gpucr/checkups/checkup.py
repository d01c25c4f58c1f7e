"""Findings of the doctor: at most one for each part of a machine or job."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from gpucr.diagnosis.preflight.findings import Finding


def ok(about: str, what: str, evidence: str = "") -> Finding:
    """No problem."""
    return Finding("ok", what, evidence, about=about)


def from_findings(about: str, findings: Iterable[Finding], otherwise: Finding | None = None) -> list[Finding]:
    """Preflight's findings about this part; ``otherwise`` if there is none."""
    found = [replace(finding, about=about) for finding in findings]
    return found or ([otherwise] if otherwise is not None else [])
