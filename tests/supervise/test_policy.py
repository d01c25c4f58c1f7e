"""When checkpoints are taken, and what is restored: pure functions."""

from __future__ import annotations

import math
from datetime import datetime, timezone

import pytest
from msgspec.structs import replace

from gpucr.errors import InvalidRequest, Unsupported
from gpucr.model import Gpu
from gpucr.store.retention import choose
from gpucr.store.stored_snapshot import StoredSnapshot
from gpucr.supervise import policy
from gpucr.supervise.gpus import good_gpus
from gpucr.supervise.settings import Supervision


def _waste(interval_s: float, downtime_s: float, mtbf_s: float) -> float:
    """Daly's exact model, without the time of a restart: wall time for a second of work (equation 20)."""
    return mtbf_s * math.expm1((interval_s + downtime_s) / mtbf_s) / interval_s


@pytest.mark.parametrize("mtbf_s", [600.0, 3600.0, 86400.0, 30 * 86400.0])
@pytest.mark.parametrize("downtime_s", [0.1, 2.0, 30.0, 120.0])
def test_the_optimal_interval_loses_least(downtime_s: float, mtbf_s: float) -> None:
    best = policy.optimal_interval_s(downtime_s, mtbf_s)
    least = min(_waste(best * factor / 100, downtime_s, mtbf_s) for factor in range(20, 500))
    assert _waste(best, downtime_s, mtbf_s) <= least * 1.001


def test_for_cheap_checkpoints_the_interval_is_youngs() -> None:
    assert policy.optimal_interval_s(1.0, 1e7) == pytest.approx(math.sqrt(2e7), rel=1e-3)


def test_when_failures_outpace_checkpoints_the_interval_is_the_mtbf() -> None:
    assert policy.optimal_interval_s(100.0, 50.0) == 50.0


def test_a_requested_interval_is_used() -> None:
    assert policy.interval_s(600.0, 2.0, 86400.0, 1000.0) == 600.0


def test_automatic_intervals_follow_measurements_and_leave_the_store_time() -> None:
    assert policy.interval_s(None, None, 86400.0, 0.0) == policy.optimal_interval_s(10.0, 86400.0)
    assert policy.interval_s(None, 0.5, 86400.0, 20.0) == policy.optimal_interval_s(0.5, 86400.0)
    assert policy.interval_s(None, 0.5, 86400.0, 2000.0) == 2000.0


def test_jitter_is_ten_percent() -> None:
    assert policy.jittered(100.0, lambda: 0.0) == 90.0
    assert policy.jittered(100.0, lambda: 0.5) == 100.0
    assert policy.jittered(100.0, lambda: 1.0) == pytest.approx(110.0)


def test_the_wait_doubles_up_to_the_maximum() -> None:
    waits = [policy.backoff_s(n, lambda: 0.5, first_s=1.0, most_s=20.0) for n in (1, 2, 3, 5, 6, 10_000)]
    assert waits == [1.0, 2.0, 4.0, 16.0, 20.0, 20.0]


def _choose(failures: dict[str, list[float]], now_s: float = 1000.0) -> str | None:
    return policy.choose_snapshot(["c", "b", "a"], failures, now_s, crashes=2, window_s=100.0)


@pytest.mark.parametrize(
    ("worked_s", "failed_at_s", "is_progress"), [(3, 0, True), (90, 100, False), (101, 100, False), (103, 100, True)]
)
def test_progress_is_work_beyond_the_last_failure(worked_s: float, failed_at_s: float, is_progress: bool) -> None:
    assert policy.made_progress(worked_s, failed_at_s, 2.0) is is_progress


def test_the_latest_snapshot_is_used_until_the_job_failed_from_it_too_often() -> None:
    assert _choose({}) == "c"
    assert _choose({"c": [990.0]}) == "c"
    assert _choose({"c": [950.0, 990.0]}) == "b"
    assert _choose({"c": [10.0, 990.0]}) == "c", "what is long ago does not count"
    assert _choose({"c": [950.0, 990.0], "b": [980.0, 981.0]}) == "a"
    assert _choose({name: [999.0, 999.0] for name in "abc"}) is None


@pytest.mark.parametrize(
    ("taken", "rehearsed", "every", "is_due"),
    [
        ("a", {}, 1, True),
        ("ab", {}, 3, False),
        ("abc", {}, 3, True),
        ("abcd", {"c": True}, 3, False),
        ("abcdef", {"c": True}, 3, True),
        ("abcd", {"c": False}, 3, True),
    ],
)
def test_every_nth_is_rehearsed_and_the_next_after_a_failure(
    taken: str, rehearsed: dict[str, bool], every: int, is_due: bool
) -> None:
    assert policy.rehearsal_is_due(taken, rehearsed, every) is is_due


def test_only_rehearsed_snapshots_count_and_newer_ones_stay() -> None:
    assert policy.counted({"b": True, "a": True, "c": False}, ["e", "d", "c", "b", "a"]) == (
        ["b", "a"],
        ["e", "d", "c"],
    )
    assert policy.counted({"b": True}, ["b", "a"]) == (["b"], [])
    assert policy.counted({"c": False}, ["c", "b"]) == ([], ["c", "b"]), "none has come back: all stay"


def test_an_unrecorded_snapshot_is_the_newest() -> None:
    assert policy.newest_first(["b", "a"], ["x", "b", "y", "a", "z"]) == ["x", "b", "a", "y", "z"]
    assert policy.newest_first([], ["b", "a"]) == ["b", "a"]
    assert policy.newest_first(["b", "a"], ["a", "b"]) == ["b", "a"], "the clock of the store was set back"


def test_a_clock_set_back_does_not_look_like_a_crash_loop() -> None:
    assert _choose({"c": [5000.0, 6000.0]}) == "b"


def _gpu(number: int, name: str = "H200", free: int = 100) -> Gpu:
    return Gpu(number, f"GPU-{number}", name, 140, free)


def test_a_job_stays_on_its_own_healthy_gpus() -> None:
    here = [_gpu(0), _gpu(1), _gpu(2)]
    assert good_gpus([_gpu(0), _gpu(1)], {"GPU-0": 90, "GPU-1": 90}, here, {"GPU-2"}) is None


def test_a_missing_or_failed_gpu_is_replaced_by_a_free_one_of_its_model() -> None:
    here = [_gpu(0), _gpu(1), _gpu(2, free=50), _gpu(3, "A10"), _gpu(4)]
    assert good_gpus([_gpu(0), _gpu(1)], {"GPU-0": 90, "GPU-1": 90}, here, {"GPU-1"}) == "GPU-0,GPU-4"
    assert good_gpus([_gpu(9), _gpu(1)], {"GPU-9": 90, "GPU-1": 90}, here, ()) == "GPU-0,GPU-1"


def test_too_few_healthy_gpus_are_refused() -> None:
    with pytest.raises(Unsupported) as caught:
        good_gpus([_gpu(0)], {"GPU-0": 90}, [_gpu(0), _gpu(1, "A10")], {"GPU-0"})
    assert caught.value.code == "GPUCR-NO-GPU"


def _stored(snapshot_id: str, name: str, created_s: float) -> StoredSnapshot:
    created = datetime.fromtimestamp(created_s, timezone.utc).isoformat()
    return StoredSnapshot(snapshot_id, name, created, "vm", b"{}", ())


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({}, 5), ({"keep_last": 2}, 2), ({"keep_last": 7}, 7), ({"keep_hourly": 3}, 3), ({"keep_daily": 2}, 2)],
)
def test_without_a_rule_the_latest_five_checkpoints_stay(settings: dict[str, int], kept: int) -> None:
    day_s = 86400.0
    taken = [_stored(f"{i}", "train", i * day_s) for i in range(9)]
    other = _stored("other", "other", 0.0)
    elsewhere = replace(_stored("elsewhere", "train", 0.5), host="another")
    chosen = Supervision(store="/store", **settings)  # type: ignore[arg-type]
    rules = policy.prune_rules(chosen, "train", "vm", ["0"], None)
    stays, goes = choose([other, elsewhere, *taken], rules, 9 * day_s)
    assert stays == [other, elsewhere, taken[0], *taken[-kept:]], "others' snapshots, and the protected one"
    assert goes == taken[1:-kept]


def test_removed_checkpoints_hold_their_data_for_an_hour_not_a_day() -> None:
    assert policy.prune_rules(Supervision(store="/store"), "train", "vm", (), None).grace_s == 3600.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every_s": 0.0}, "--every is 0 s"),
        ({"every_s": float("nan")}, "--every is nan s"),
        ({"every_s": 1e9}, "--every is 1e+09 s"),
        ({"every_s": None, "mtbf_s": -1.0}, "--mtbf"),
        ({"every_s": 7200.0, "mtbf_s": 3600.0}, "most of the work would be lost"),
        ({"grace_s": 0.0}, "--grace"),
        ({"output_timeout_s": float("inf")}, "--output-timeout"),
        ({"crashes": 0}, "--crashes"),
        ({"max_restarts": -3}, "--max-restarts"),
        ({"keep_last": 0}, "--keep-last 0 would keep no snapshot to restore from"),
        ({"keep_hourly": 0}, "--keep-hourly 0 would keep no snapshot to restore from"),
    ],
)
def test_invalid_times_and_numbers_are_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words.replace("+", r"\+")):
        Supervision(store="/store", **{"every_s": 600.0, **settings}).check()  # type: ignore[arg-type]
