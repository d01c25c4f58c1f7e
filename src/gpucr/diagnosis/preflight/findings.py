"""What a check returns, and what a finding leads to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gpucr.errors import Unsupported

_MOST_TOLD = 4


@dataclass(frozen=True)
class Finding:
    """One thing that stands in the way. ``pid`` is None where it concerns the machine.

    ``code`` names the situation, as in `gpucr.errors`. A blocking finding has one of its own.
    """

    severity: Literal["blocking", "warning"]
    what: str
    evidence: str
    consequence: str
    remedy: str
    pid: int | None = None
    code: str = Unsupported.code

    def sentence(self) -> str:
        """What and evidence in one line."""
        return f"{self.what} ({self.evidence})"


def require_no_blocking(findings: Iterable[Finding], *, force: bool = False) -> None:
    """Raise Unsupported with the first blocking findings and the number of the others, unless ``force`` insists."""
    blocking = [finding for finding in findings if finding.severity == "blocking"]
    if not blocking or force:
        return
    first = blocking[0]
    others = "".join(f"; also: {finding.sentence()}" for finding in blocking[1:_MOST_TOLD])
    if len(blocking) > _MOST_TOLD:
        others += f"; and {len(blocking) - _MOST_TOLD} more"
    raise Unsupported(
        f"{first.sentence()}: {first.consequence}{others}",
        hint=f"{first.remedy} (--force tries all the same; nothing was changed)",
        code=first.code,
    )
