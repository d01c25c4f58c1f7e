"""When to take a checkpoint, when and from what to restart: pure functions of numbers. No clock, no files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

ASSUMED_DOWNTIME_S = 10.0
"""How long a job stands still for a checkpoint, assumed until one was measured."""
JITTER = 0.1
_SMOOTHING = 0.3

Random = Callable[[], float]
"""A number from 0 up to, not including, 1: `random.random`."""


def optimal_interval_s(downtime_s: float, mtbf_s: float) -> float:
    """The time to work between two checkpoints that loses least of it.

    ``downtime_s``: how long the job stands still for one; ``mtbf_s``: mean time between failures. J. Daly, "A higher
    order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006),
    equation 37. Its first term is Young's: sqrt(2 * downtime * mtbf).
    """
    if downtime_s >= 2 * mtbf_s:
        return mtbf_s
    part = downtime_s / (2 * mtbf_s)
    return math.sqrt(2 * downtime_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - downtime_s


def interval_s(every_s: float | None, downtime_s: float | None, mtbf_s: float, checkpoint_s: float) -> float:
    """The time from one checkpoint to the next: what was asked for, or the optimum.

    ``checkpoint_s``: how long the last one took in all, also while the job ran: the optimum is never shorter, or the
    store would be written to all the time.
    """
    if every_s is not None:
        return every_s
    measured_s = ASSUMED_DOWNTIME_S if downtime_s is None else downtime_s
    return max(optimal_interval_s(measured_s, mtbf_s), checkpoint_s)


def smoothed(before: float | None, measured: float) -> float:
    """A running mean, in which what was measured last counts most."""
    return measured if before is None else before + _SMOOTHING * (measured - before)


def jittered(seconds: float, random: Random) -> float:
    """Up to a tenth less or more: jobs that were started together do not write to a store together for ever."""
    return seconds * (1 + JITTER * (2 * random() - 1))


def backoff_s(attempt: int, random: Random, *, first_s: float, most_s: float) -> float:
    """How long to wait before attempt 1, 2, ...: doubled each time, with jitter."""
    return jittered(min(first_s * 2.0 ** min(attempt - 1, 60), most_s), random)


def newest_first(known: Sequence[str], in_store: Sequence[str]) -> list[str]:
    """The job's snapshots, the newest first.

    ``known``: those that its supervisor noted, in the order in which it took them, not by the clock;
    ``in_store``: all, by the clock of the store. One that is not known, and newer than all that are, was committed
    by a supervisor that was killed before it could note it.
    """
    newer = in_store[: in_store.index(known[0])] if known else in_store
    unknown = [each for each in in_store if each not in known]
    return [*(each for each in unknown if each in newer), *known, *(each for each in unknown if each not in newer)]


def choose_snapshot(
    newest_first: Sequence[str],
    failures: Mapping[str, Sequence[float]],
    now_s: float,
    *,
    crashes: int,
    window_s: float,
) -> str | None:
    """The latest snapshot from which the job has not failed ``crashes`` times within ``window_s``. None: there is none.

    ``failures``: when the job failed after it had been restored from this snapshot. One that seems to be in the future,
    because the clock was set back, counts as recent.
    """
    for snapshot in newest_first:
        recent = [when for when in failures.get(snapshot, ()) if now_s - when <= window_s]
        if len(recent) < crashes:
            return snapshot
    return None
