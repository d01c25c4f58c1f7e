"""When to take a checkpoint, and when and from which snapshot to restart: pure functions. No clock, no files."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from gpucr import PruneRules
from gpucr.supervise.settings import Supervision

ASSUMED_DOWNTIME_S = 10.0
"""Assumed downtime of a checkpoint until one was measured."""
JITTER = 0.1
KEEP_LAST = 5
"""Without a rule. If all were kept, a checkpoint every ten minutes would fill any disk."""
PRUNE_GRACE_S = 3600.0
"""Enough for whoever restores or copies a checkpoint while it is removed: they can repeat it with another one.

With the day that `gpucr prune` waits, a checkpoint every ten minutes would hold the data of 144 removed ones.
"""
_SMOOTHING = 0.3

Random = Callable[[], float]
"""A number from 0 up to, not including, 1: `random.random`."""


def optimal_interval_s(downtime_s: float, mtbf_s: float) -> float:
    """The optimal working time between two checkpoints, which loses the least time.

    ``downtime_s``: how long the job is stopped for one; ``mtbf_s``: mean time between failures. J. Daly, "A higher
    order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22 (2006),
    equation 37. Its first term is Young's: sqrt(2 * downtime * mtbf).
    """
    if downtime_s >= 2 * mtbf_s:
        return mtbf_s
    part = downtime_s / (2 * mtbf_s)
    return math.sqrt(2 * downtime_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - downtime_s


def interval_s(every_s: float | None, downtime_s: float | None, mtbf_s: float, checkpoint_s: float) -> float:
    """The time from one checkpoint to the next: as configured, or the optimum.

    ``checkpoint_s``: total duration of the last one, including while the job ran: the optimum is never shorter, or the
    store would be written to constantly.
    """
    if every_s is not None:
        return every_s
    measured_s = ASSUMED_DOWNTIME_S if downtime_s is None else downtime_s
    return max(optimal_interval_s(measured_s, mtbf_s), checkpoint_s)


def smoothed(before: float | None, measured: float) -> float:
    """A running mean that weights recent measurements most."""
    return measured if before is None else before + _SMOOTHING * (measured - before)


def jittered(seconds: float, random: Random) -> float:
    """Up to a tenth less or more, so that jobs started together do not always write to the store together."""
    return seconds * (1 + JITTER * (2 * random() - 1))


def backoff_s(attempt: int, random: Random, *, first_s: float, most_s: float) -> float:
    """How long to wait before attempt 1, 2, ...: doubles each time, with jitter."""
    return jittered(min(first_s * 2.0 ** min(attempt - 1, 60), most_s), random)


def made_progress(worked_s: float, failed_at_s: float, checkpoint_s: float) -> bool:
    """Whether a job that has worked for ``worked_s`` is beyond the point where it last failed.

    Both count from its start, over all restores. Only then do restarts count from zero again: a job that
    always fails at the same point also takes new checkpoints after every restart. How much work was done during a
    checkpoint (``checkpoint_s``: its duration) is not known exactly.
    """
    return worked_s > failed_at_s + checkpoint_s


def newest_first(known: Sequence[str], in_store: Sequence[str]) -> list[str]:
    """The job's snapshots, newest first.

    ``known``: those recorded by its supervisor, in the order of the dumps, not by clock; ``in_store``: all, by the
    store's clock. An unknown one that is newer than all known ones was committed by a supervisor that was killed before
    it could record it.
    """
    newer = in_store[: in_store.index(known[0])] if known else in_store
    unknown = [each for each in in_store if each not in known]
    return [*(each for each in unknown if each in newer), *known, *(each for each in unknown if each not in newer)]


def rehearsal_is_due(taken: Sequence[str], rehearsed: Mapping[str, bool], every: int) -> bool:
    """Whether the last snapshot is to be rehearsed: ``every`` since the last one that came back, or since the first.

    ``taken``: all ids, in the order of the dumps. One that did not come back is followed by another try at once.
    """
    since = 0
    for snapshot in reversed(taken):
        if rehearsed.get(snapshot) is not None:
            return since >= every or not rehearsed[snapshot]
        since += 1
    return since >= every


def counted(rehearsed: Mapping[str, bool], in_store: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the snapshots that count when they are thinned out, and which stay besides. ``in_store``: newest first.

    Those count that came back in a rehearsal. Newer ones stay; all stay if none has come back.
    """
    good = [each for each in in_store if rehearsed.get(each)]
    newer = in_store[: in_store.index(good[0])] if good else in_store
    return good, list(newer)


def prune_rules(
    settings: Supervision, name: str, host: str, protected: Collection[str], counted: Collection[str] | None
) -> PruneRules:
    """Which snapshots of the job ``name`` on this host stay: as configured, or the latest five.

    ``counted``: as in PruneRules.
    """
    has_rule = (settings.keep_last, settings.keep_hourly, settings.keep_daily) != (None, None, None)
    return PruneRules(
        keep_last=settings.keep_last if has_rule else KEEP_LAST,
        keep_hourly=settings.keep_hourly,
        keep_daily=settings.keep_daily,
        names=(name,),
        host=host,  # a job on another one may have the same name
        per_name=True,
        protected=tuple(protected),
        counted=tuple(counted) if counted is not None else None,
        grace_s=PRUNE_GRACE_S,
    )


def choose_snapshot(
    newest_first: Sequence[str],
    failures: Mapping[str, Sequence[float]],
    now_s: float,
    *,
    crashes: int,
    window_s: float,
) -> str | None:
    """The latest snapshot from which the job has not failed ``crashes`` times within ``window_s``; None: there is none.

    ``failures``: when the job failed after a restore from this snapshot. A time in the future, because the clock was
    set back, counts as recent.
    """
    for snapshot in newest_first:
        recent = [when for when in failures.get(snapshot, ()) if now_s - when <= window_s]
        if len(recent) < crashes:
            return snapshot
    return None
