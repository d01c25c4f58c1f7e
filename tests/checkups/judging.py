"""Shared by the tests of single checks."""

from __future__ import annotations

from collections.abc import Iterable

from gpucr import Finding


def severities(found: Iterable[Finding]) -> list[str]:
    """The severities in order. Problems must have a consequence and a remedy; everything has evidence."""
    listed = list(found)
    for each in listed:
        assert each.about
        assert each.what
        assert each.evidence
        assert each.severity == "ok" or each.remedy
        assert each.severity in ("ok", "unknown") or each.consequence
        assert each.severity != "ok" or not each.remedy
    return [each.severity for each in listed]


def only(found: Iterable[Finding]) -> Finding:
    """The one that is not ok."""
    (one,) = [each for each in found if each.severity != "ok"]
    severities([one])
    return one
