"""Findings, which checks return, and their effect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from gpucr.errors import Unsupported

_MOST_TOLD = 4


Severity = Literal["ok", "warning", "blocking", "unknown"]
"""``blocking``: an operation would be refused or fail. ``unknown``: not visible or not measured."""

RepairName = Literal["fetch-criu", "huge-pages-shared", "huge-pages-private"]
"""What `gpucr doctor --fix` can do (checkups/repairs.py)."""


class Finding(Struct, frozen=True):
    """One check's result about a job (preflight) or a machine (doctor, which also reports what is fine).

    An ``ok`` has no consequence and no remedy. ``pid`` is None if it concerns the machine or the whole job. ``code``
    names the situation, as in `gpucr.errors`; may be None. ``about``: the part of the machine or job that the doctor
    checked; ``repair``: what `gpucr doctor --fix` would do.
    """

    severity: Severity
    what: str
    evidence: str
    consequence: str = ""
    remedy: str = ""
    pid: int | None = None
    code: str | None = None
    about: str = ""
    repair: RepairName | None = None

    def sentence(self) -> str:
        """What and evidence in one line."""
        return f"{self.what} ({self.evidence})" if self.evidence else self.what

    def warning(self) -> str:
        """The sentence, what follows from it, and what to do."""
        hint = f"; hint: {self.remedy}" if self.remedy else ""
        return f"{self.sentence()}: {self.consequence}{hint}" if self.consequence else f"{self.sentence()}{hint}"


def require_no_blocking(findings: Iterable[Finding], *, force: bool | None = False) -> None:
    """Raise Unsupported with the first blocking findings and the number of the others, unless ``force``.

    None: nobody can insist here, and the hint does not say so.
    """
    blocking = [finding for finding in findings if finding.severity == "blocking"]
    if not blocking or force:
        return
    first = blocking[0]
    others = "".join(f"; also: {finding.sentence()}" for finding in blocking[1:_MOST_TOLD])
    if len(blocking) > _MOST_TOLD:
        others += f"; and {len(blocking) - _MOST_TOLD} more"
    raise Unsupported(
        f"{first.sentence()}: {first.consequence}{others}",
        hint=first.remedy if force is None else f"{first.remedy} (--force proceeds anyway; nothing was changed)",
        code=first.code,
    )
