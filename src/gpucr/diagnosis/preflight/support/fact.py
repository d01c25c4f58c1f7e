"""One thing that preflight refuses or warns of, in the words in which it says so."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gpucr.diagnosis.preflight.findings import Finding


class Fact(Struct, frozen=True, kw_only=True):
    """What is wrong with a job or machine, what follows, and what to do; a check says when it is so.

    The texts may have ``{names}``, whose values the check gives. ``unless``: it is not said, or is a warning with
    ``warning_consequence``, where all of these canaries came back. ``warning_if``: when else it is only a warning.
    ``case`` tells it from others of the same words; ``kinds`` are what it is about.
    """

    what: str
    consequence: str
    remedy: str
    code: str | None = None
    severity: Literal["blocking", "warning"] = "blocking"
    warning_if: str = ""
    warning_consequence: str = ""
    unless: tuple[str, ...] = ()
    case: str = ""
    kinds: tuple[str, ...] = ()

    def seen(self, evidence: str, pid: int | None = None, /, *, as_warning: bool = False, **values: object) -> Finding:
        """The finding, with the values of the texts."""
        consequence = self.warning_consequence if as_warning and self.warning_consequence else self.consequence
        return Finding(
            "warning" if as_warning else self.severity,
            self.what.format_map(values),
            evidence,
            consequence.format_map(values),
            self.remedy.format_map(values),
            pid,
            code=self.code,
        )
