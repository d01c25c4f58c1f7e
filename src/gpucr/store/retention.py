"""Which snapshots of a store to keep: a pure function of the snapshots, the rules and the time."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime, timezone

from msgspec import Struct

from gpucr.store.stored_snapshot import StoredSnapshot

GRACE_S = 24 * 3600.0
DEAD_AFTER_S = 3600.0


class PruneRules(Struct, frozen=True):
    """Which snapshots to keep, and the grace periods.

    A snapshot is kept if one of the ``keep_`` rules says so; without rules all are kept. ``keep_last``: the N latest.
    ``keep_within_s``: younger ones. ``keep_hourly`` and the others: of the N latest hours (days, weeks, months; in UTC)
    that have one, the latest of each. ``names``: shell patterns; the rules apply to snapshots whose name matches one of
    them, all others are kept. ``host``: only to those that were taken on it. ``per_name``: each name is counted
    separately, and the latest of each is always kept. ``protected`` ids are always kept. ``counted``: only these ids
    (None: all) are counted and kept by the rules.

    ``grace_s``: how long a retired pack stays, for readers of a removed snapshot. ``dead_after_s``: a writer without a
    sign of life for this long can no longer commit. ``repack_below``: packs are emptied into new ones if less than this
    part of them is needed (0: none).
    """

    keep_last: int | None = None
    keep_within_s: float | None = None
    keep_hourly: int | None = None
    keep_daily: int | None = None
    keep_weekly: int | None = None
    keep_monthly: int | None = None
    names: tuple[str, ...] = ()
    host: str | None = None
    per_name: bool = False
    protected: tuple[str, ...] = ()
    counted: tuple[str, ...] | None = None
    grace_s: float = GRACE_S
    dead_after_s: float = DEAD_AFTER_S
    repack_below: float = 0.0

    @property
    def may_keep_none(self) -> bool:
        """Whether they can remove all that they apply to: no rule has a number of at least 1, and there is a rule."""
        counts = (self.keep_last, self.keep_hourly, self.keep_daily, self.keep_weekly, self.keep_monthly)
        return not (self.per_name or _keeps_all(self) or any(counts))

    def applies_to(self, snapshot: StoredSnapshot) -> bool:
        """Whether its name and host are such that the rules are for it."""
        if self.host is not None and snapshot.host != self.host:
            return False
        return not self.names or any(fnmatch.fnmatchcase(snapshot.name or "", pattern) for pattern in self.names)


def choose(
    found: Sequence[StoredSnapshot], rules: PruneRules, now_s: float
) -> tuple[list[StoredSnapshot], list[StoredSnapshot]]:
    """Return which of the snapshots, oldest first, to keep and which to remove."""
    if _keeps_all(rules):
        return list(found), []
    kept = set(rules.protected)
    for group in _groups(found, rules, kept):
        kept.update(each.id for each in _kept(group, rules, now_s))
    return [each for each in found if each.id in kept], [each for each in found if each.id not in kept]


def _keeps_all(rules: PruneRules) -> bool:
    counts = (rules.keep_last, rules.keep_hourly, rules.keep_daily, rules.keep_weekly, rules.keep_monthly)
    return rules.keep_within_s is None and all(count is None for count in counts)


def _groups(found: Iterable[StoredSnapshot], rules: PruneRules, kept: set[str]) -> Collection[Sequence[StoredSnapshot]]:
    """Groups that are counted together. Snapshots outside the rules are added to ``kept``."""
    groups: dict[str | None, list[StoredSnapshot]] = {}
    for each in found:
        if not rules.applies_to(each):
            kept.add(each.id)
        elif rules.counted is None or each.id in rules.counted:
            groups.setdefault(each.name if rules.per_name else None, []).append(each)
    return groups.values()


def _kept(group: Sequence[StoredSnapshot], rules: PruneRules, now_s: float) -> Iterator[StoredSnapshot]:
    if rules.per_name:
        yield group[-1]
    yield from group[max(0, len(group) - (rules.keep_last or 0)) :]
    if rules.keep_within_s is not None:
        yield from (each for each in group if now_s - each.created_s <= rules.keep_within_s)
    for count, period in (
        (rules.keep_hourly, "%Y-%m-%d %H"),
        (rules.keep_daily, "%Y-%m-%d"),
        (rules.keep_weekly, "%G-%V"),
        (rules.keep_monthly, "%Y-%m"),
    ):
        latest = {datetime.fromtimestamp(each.created_s, timezone.utc).strftime(period): each for each in group}
        yield from list(latest.values())[max(0, len(latest) - (count or 0)) :]
