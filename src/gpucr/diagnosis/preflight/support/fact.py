"""One thing that preflight refuses or warns about, with its texts."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from gpucr.diagnosis.preflight.findings import Finding, RepairName


class Fact(Struct, frozen=True, kw_only=True):
    """A problem of a job or machine, its consequence, and what to do; a check decides whether it applies.

    The texts may have ``{names}``, whose values the check supplies. ``unless``: omitted, or a warning with
    ``warning_consequence``, if all of these canaries came back. ``warning_if``: other cases in which it is only a
    warning. ``case`` distinguishes it from others with the same words; ``kinds``: the kinds of thing that it concerns.
    ``about`` and ``repair``: the finding's.
    """

    what: str
    consequence: str
    remedy: str
    code: str | None = None
    severity: Literal["blocking", "warning", "unknown"] = "blocking"
    warning_if: str = ""
    warning_consequence: str = ""
    unless: tuple[str, ...] = ()
    case: str = ""
    kinds: tuple[str, ...] = ()
    about: str = ""
    repair: RepairName | None = None

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
            about=self.about,
            repair=self.repair,
        )
