"""What fixed and automatic intervals between checkpoints cost, simulated, beside the optimum in theory.

Pure functions of numbers: nothing is dumped, and a year of training takes a second.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click

from gpucr.supervise import policy

DOWNTIME_S, RESTART_S = 5.0, 120.0
MTBFS_H = (1.0, 3.0, 6.0, 12.0, 24.0, 72.0, 168.0)
FIXED_MIN = (2, 10, 60)
_NOISE = 0.3

Interval = Callable[[float | None], float]
"""The time until the next checkpoint; it is given the downtime that was measured, None before the first."""


@dataclass(frozen=True)
class Row:
    """Overheads, as parts of the work, for one mean time between failures."""

    mtbf_h: float
    optimum: float
    automatic: float
    fixed: dict[str, float]


def simulated_wall_s(work_s: float, mtbf_s: float, interval: Interval, dice: random.Random) -> float:
    """How long so much work takes, with failures that come at random (a Poisson process).

    A failure takes the job back to its last checkpoint, and ``RESTART_S``. Failures come in checkpoints and restarts
    too. The downtime of a checkpoint varies.
    """
    wall_s = done_s = 0.0
    downtime_s: float | None = None
    failure_s = dice.expovariate(1 / mtbf_s)
    while done_s < work_s:
        step_s = min(interval(downtime_s), work_s - done_s)
        cost_s = DOWNTIME_S * (1 + _NOISE * (2 * dice.random() - 1))
        if wall_s + step_s + cost_s <= failure_s:
            wall_s += step_s + cost_s
            done_s += step_s
            downtime_s = policy.smoothed(downtime_s, cost_s)
            continue
        wall_s = failure_s
        failure_s = wall_s + dice.expovariate(1 / mtbf_s)
        while wall_s + RESTART_S > failure_s:  # it fails again before it is back
            wall_s = failure_s
            failure_s = wall_s + dice.expovariate(1 / mtbf_s)
        wall_s += RESTART_S
    return wall_s


def least_overhead(mtbf_s: float) -> float:
    """In theory, with the best of all intervals: Daly (2006), equation 20, searched for its minimum."""

    def overhead(interval_s: float) -> float:
        return mtbf_s * math.exp(RESTART_S / mtbf_s) * math.expm1((interval_s + DOWNTIME_S) / mtbf_s) / interval_s - 1

    about_s = policy.optimal_interval_s(DOWNTIME_S, mtbf_s)
    return min(overhead(about_s * factor / 100) for factor in range(10, 1000))


def automatic(mtbf_s: float, dice: random.Random) -> Interval:
    """What a supervisor does with ``--every auto``, jitter included."""
    return lambda downtime_s: policy.jittered(policy.interval_s(None, downtime_s, mtbf_s, DOWNTIME_S), dice.random)


def fixed(minutes: float, dice: random.Random) -> Interval:
    """What it does with ``--every 10m``."""
    return lambda _: policy.jittered(minutes * 60.0, dice.random)


def measure(mtbf_h: float, *, failures: int, seed: int = 0) -> Row:
    """Simulate as much work as has about so many failures."""
    mtbf_s = mtbf_h * 3600
    work_s = mtbf_s * failures

    def overhead(make: Callable[[random.Random], Interval]) -> float:
        dice = random.Random(f"{seed} {mtbf_h}")  # noqa: S311 - the same failures for all
        return simulated_wall_s(work_s, mtbf_s, make(dice), dice) / work_s - 1

    return Row(
        mtbf_h=mtbf_h,
        optimum=least_overhead(mtbf_s),
        automatic=overhead(lambda dice: automatic(mtbf_s, dice)),
        fixed={f"{minutes} min": overhead(lambda dice, m=minutes: fixed(m, dice)) for minutes in FIXED_MIN},  # type: ignore[misc]
    )


@click.command()
@click.option("--failures", type=click.IntRange(min=10), default=3000, show_default=True, help="Failures a figure.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, failures: int, as_json: bool) -> None:
    """Simulate what intervals between checkpoints cost: time lost to checkpoints, lost work and restarts."""
    rows = [measure(mtbf_h, failures=failures) for mtbf_h in MTBFS_H]
    if as_json:
        found: dict[str, Any] = {"downtime_s": DOWNTIME_S, "restart_s": RESTART_S, "rows": [asdict(r) for r in rows]}
        click.echo(json.dumps(found, indent=2))
        return
    names = [f"every {name}" for name in rows[0].fixed]
    click.echo("| MTBF | " + " | ".join(names) + " | auto | optimum in theory |")
    click.echo("| ---: |" + " ---: |" * (len(names) + 2))
    for row in rows:
        figures = [*row.fixed.values(), row.automatic, row.optimum]
        click.echo(f"| {row.mtbf_h:g} h | " + " | ".join(f"{100 * figure:.2f} %" for figure in figures) + " |")
