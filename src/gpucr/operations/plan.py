"""What an operation would do: the same code prepares a plan and a run, so that they cannot disagree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gpucr.diagnosis.preflight.findings import Finding, require_no_blocking
from gpucr.undo.steps import Step


@dataclass(frozen=True)
class Plan:
    """What an operation would do, in order, and what preflight found (``--dry-run``).

    ``pid``: the job's first process; of a restore, the one that it had.
    """

    pid: int
    steps: tuple[str, ...]
    findings: tuple[Finding, ...] = field(repr=False)

    @classmethod
    def of(cls, pid: int, steps: Iterable[Step], findings: Iterable[Finding]) -> Plan:
        """The plan of these steps."""
        return cls(pid, tuple(step.describe() for step in steps), tuple(findings))

    @property
    def is_refused(self) -> bool:
        """Whether the operation would change nothing, and raise Unsupported, unless it is told to proceed anyway."""
        return any(finding.severity == "blocking" for finding in self.findings)

    def require_possible(self) -> None:
        """Raise Unsupported with what the operation would be refused for."""
        require_no_blocking(self.findings)
