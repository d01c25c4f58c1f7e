"""What the tests of single checks share."""

from __future__ import annotations

from collections.abc import Iterable

from gpucr import Checkup


def verdicts(found: Iterable[Checkup]) -> list[str]:
    """In their order. What stands in the way must say what it leads to and what mends it; everything has evidence."""
    listed = list(found)
    for each in listed:
        assert each.about
        assert each.what
        assert each.evidence
        assert each.verdict == "ok" or each.remedy
        assert each.verdict in ("ok", "unknown") or each.consequence
        assert each.verdict != "ok" or not each.remedy
    return [each.verdict for each in listed]


def only(found: Iterable[Checkup]) -> Checkup:
    """The one that is not ok."""
    (one,) = [each for each in found if each.verdict != "ok"]
    verdicts([one])
    return one
