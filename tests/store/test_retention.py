"""Which snapshots a prune keeps."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpucr.store.retention import PruneRules, choose
from gpucr.store.stored_snapshot import StoredSnapshot

NOW = datetime(2026, 3, 4, 12, 30, tzinfo=timezone.utc)


def _snapshot(id_: str, age: timedelta, name: str | None = "train") -> StoredSnapshot:
    return StoredSnapshot(id_, name, (NOW - age).isoformat(), "host", b"", ())


def _kept(found: list[StoredSnapshot], **rules: Any) -> list[str]:
    kept, removed = choose(found, PruneRules(**rules), NOW.timestamp())
    assert sorted(each.id for each in (*kept, *removed)) == sorted(each.id for each in found)
    return [each.id for each in kept]


EVERY_20_MIN = [_snapshot(f"{minutes}", timedelta(minutes=minutes)) for minutes in range(24 * 60, 0, -20)]


def test_without_rules_all_are_kept() -> None:
    assert len(_kept(EVERY_20_MIN)) == len(EVERY_20_MIN)
    assert len(_kept(EVERY_20_MIN, names=("other",), per_name=True)) == len(EVERY_20_MIN)


def test_snapshots_of_another_host_stay() -> None:
    found = [_snapshot("old", timedelta(hours=3)), _snapshot("new", timedelta(hours=1))]
    assert _kept(found, keep_last=1, host="host") == ["new"]
    assert _kept(found, keep_last=1, host="another") == ["old", "new"]


def test_the_latest_of_each_hour_and_day() -> None:
    assert _kept(EVERY_20_MIN, keep_hourly=3) == ["100", "40", "20"]  # taken at 10:50, 11:50 and 12:10
    assert _kept(EVERY_20_MIN, keep_daily=2) == ["760", "20"]  # 23:50 of the day before
    assert _kept(EVERY_20_MIN, keep_last=2, keep_daily=2) == ["760", "40", "20"]


def test_calendar_weeks_and_months() -> None:
    days = [_snapshot(str(day), timedelta(days=day)) for day in range(90, -1, -1)]
    assert _kept(days, keep_weekly=2) == ["3", "0"]  # 2026-03-01 was a Sunday
    assert _kept(days, keep_monthly=3) == ["32", "4", "0"]
    assert _kept(days, keep_monthly=0, keep_last=1) == ["0"]


def test_rules_by_name_leave_others_alone() -> None:
    found = [_snapshot("a", timedelta(3), "train-1"), _snapshot("b", timedelta(2), "eval"),
             _snapshot("c", timedelta(1), None), _snapshot("d", timedelta(0), "train-2")]  # fmt: skip
    assert _kept(found, keep_last=1, names=("train-*",)) == ["b", "c", "d"]
    assert _kept(found, keep_last=1, names=("train-*", "eval")) == ["c", "d"]


def test_each_name_is_counted_separately_and_keeps_its_latest() -> None:
    found = [_snapshot(f"{name}{age}", timedelta(age), name) for age in (3, 2, 1) for name in ("a", "b")]
    assert _kept(found, keep_last=2, per_name=True) == ["a2", "b2", "a1", "b1"]
    assert _kept(found, keep_last=0, per_name=True) == ["a1", "b1"]
    assert _kept(found, keep_last=0) == []


def test_only_some_may_count() -> None:
    found = [_snapshot(f"a{age}", timedelta(age), "a") for age in (5, 4, 3, 2, 1)]
    assert _kept(found, keep_last=2, counted=("a5", "a3", "a2")) == ["a3", "a2"]
    assert _kept(found, keep_last=2, per_name=True, counted=("a5", "a3"), protected=("a1",)) == ["a5", "a3", "a1"]
    assert _kept(found, keep_last=2, counted=()) == []
    assert len(_kept(found, counted=())) == 5, "without a rule all are kept"


@pytest.mark.parametrize("rules", [{"keep_last": 0}, {"keep_within_s": 0.0}, {"keep_hourly": 0}])
def test_a_protected_snapshot_stays(rules: dict[str, Any]) -> None:
    assert "1000" in _kept(EVERY_20_MIN, protected=("1000",), **rules)
