"""The simulation of intervals: automatic ones come close to the optimum at every failure rate."""

from __future__ import annotations

import random

import pytest

from benchmarks import intervals


@pytest.mark.parametrize("mtbf_h", [1.0, 12.0])
def test_automatic_intervals_cost_what_theory_predicts_and_less_than_fixed_ones(mtbf_h: float) -> None:
    row = intervals.measure(mtbf_h, failures=400)
    assert row.automatic == pytest.approx(row.optimum, rel=0.1)
    assert row.automatic < 1.05 * min(row.fixed.values())
    assert max(row.fixed.values()) > 1.5 * row.automatic


def test_without_failures_a_job_pays_only_for_its_checkpoints() -> None:
    dice = random.Random(1)  # noqa: S311
    wall_s = intervals.simulated_wall_s(36_000.0, 1e12, lambda _: 600.0, dice)
    assert wall_s == pytest.approx(36_000 + 60 * intervals.DOWNTIME_S, rel=0.002)
