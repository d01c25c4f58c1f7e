"""The loop of a supervisor, with a job and a clock of the test's own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpucr.errors import JobDamaged, ProcessNotFound, RehearsalFailed, StoreDamaged, StoreError, Unsupported
from gpucr.jobs.sidecar import StoredLaunch
from gpucr.linux import durable
from gpucr.store.opened import NO_SPACE
from gpucr.supervise.clock import Stop
from gpucr.supervise.job import Checkpoint, Look
from tests.supervise.conftest import CRASHED, DONE, RUNNING, Bench

UNREACHABLE = StoreError("the store cannot be reached", path="/store")
ANEW = StoredLaunch(("python", "train.py"), "/", {}, isolate=True, network="own", interpose=False)


# --- checkpoints -----------------------------------------------------------------------------------------------


def test_checkpoints_are_taken_on_time_until_the_job_ends(bench: Bench) -> None:
    bench.clock.after(2000, bench.ends(DONE))
    assert bench.supervise(keep_last=3) == "finished"
    assert bench.job.at == pytest.approx([600, 1205, 1810])
    assert bench.job.done == ["checkpoint"] * 3
    state = bench.folder.state()
    assert (state.phase, state.process, dict(state.checkpoints)) == ("finished", None, {"success": 3})
    assert [each.id for each in state.snapshots] == ["s1", "s2", "s3"]
    assert bench.job.protected == [{"s1"}, {"s2"}, {"s3"}], "the last that verified is never pruned"
    assert bench.events("checkpoint")[0]["downtime_s"] == 2.0
    assert bench.events()[-1]["phase"] == "finished"


def _fails(snapshot: str) -> RehearsalFailed:
    return RehearsalFailed(f"{snapshot} does not come back", path=snapshot, cause_code="GPUCR-CRIU")


def test_every_nth_checkpoint_is_rehearsed_and_only_those_count(bench: Bench) -> None:
    bench.job.rehearsal_errors = [None, _fails("s4"), None]
    bench.clock.after(3700, bench.ends(DONE))
    assert bench.supervise(keep_last=3, rehearse=2) == "finished"
    done = [each for each in bench.job.done if each.startswith("rehearse")]
    assert done == ["rehearse s2", "rehearse s4", "rehearse s5"], "after one that failed, the next one"
    assert bench.job.counted == [[], ["s2"], ["s2"], ["s2"], ["s5", "s2"], ["s5", "s2"]]
    assert bench.job.protected[0] == {"s1"}
    assert bench.job.protected[3] == {"s3", "s4"}, "what is newer than the last that came back"
    assert bench.job.protected[5] == {"s6"}
    state = bench.folder.state()
    assert (dict(state.rehearsed), dict(state.rehearsals)) == (
        {"s2": True, "s4": False, "s5": True},
        {"success": 2, "failed": 1},
    )
    assert [event["snapshot"] for event in bench.events("rehearsed")] == ["s2", "s5"]
    (failed,) = bench.events("rehearsal-failed")
    assert (failed["snapshot"], failed["code"], failed["comes_back"]) == ("s4", "GPUCR-REHEARSAL", False)


def test_a_snapshot_that_failed_its_rehearsal_is_the_last_resort(bench: Bench) -> None:
    bench.job.rehearsal_errors = [None, _fails("s2")]
    bench.clock.after(1300, bench.ends(CRASHED))
    bench.job.on_restore = lambda: bench.clock.after(bench.clock.now - 1000 + 100, bench.ends(DONE))
    assert bench.supervise(rehearse=1) == "finished"
    assert [each for each in bench.job.done if each.startswith("restore")] == ["restore s1"]


def test_a_rehearsal_that_cannot_be_held_says_nothing_about_the_snapshot(bench: Bench) -> None:
    bench.job.rehearsal_errors = [Unsupported("no memory for it", code="GPUCR-HOST-MEMORY")]
    bench.clock.after(700, bench.ends(DONE))
    assert bench.supervise(rehearse=1, keep_last=1) == "finished"
    state = bench.folder.state()
    assert (dict(state.rehearsed), dict(state.rehearsals)) == ({}, {"not-held": 1})
    assert bench.events("rehearsal-failed")[0]["comes_back"] is None
    assert bench.job.counted == [[]]
    assert bench.job.protected == [{"s1"}]


def test_automatic_intervals_adapt_to_the_measured_downtime(bench: Bench) -> None:
    bench.clock.after(5000, bench.ends(DONE))
    bench.supervise(every_s=None, mtbf_s=86400.0)
    first, second, *_ = bench.job.at
    assert first == pytest.approx(1315, abs=10)  # as if it took 10 s
    assert second - first - 5 == pytest.approx(588, abs=3)  # it took 2 s


def test_a_failed_checkpoint_is_reported_and_retried_and_the_job_is_left_alone(bench: Bench) -> None:
    bench.job.checkpoint_errors = [UNREACHABLE, UNREACHABLE, UNREACHABLE, None]
    bench.clock.after(700, bench.ends(DONE))
    bench.supervise(backoff_first_s=10.0)
    assert bench.job.at == pytest.approx([600, 615, 640, 685])  # after 10, 20 and 40 s; each takes 5 s
    assert bench.job.done == ["checkpoint"]
    assert dict(bench.folder.state().checkpoints) == {"failed": 3, "success": 1}
    told = bench.events("checkpoint-failed")
    assert [event["again_in_s"] for event in told] == [10.0, 20.0, 40.0]
    assert told[0]["code"] == "GPUCR-STORE"
    assert bench.folder.state().failed_checkpoints_in_a_row == 0


def test_a_full_store_keeps_the_last_good_snapshot_for_a_restart(bench: Bench) -> None:
    full = StoreError("no space left", path="/store", code=NO_SPACE)
    bench.job.checkpoint_errors = [None, *[full] * 1000]
    bench.clock.after(1500, bench.ends(CRASHED))
    bench.clock.after(1600, bench.ends(DONE))
    bench.supervise()
    assert "restore s1" in bench.job.done


def test_a_full_store_is_pruned_even_if_no_checkpoint_succeeds(bench: Bench) -> None:
    bench.job.checkpoint_errors = [None, StoreError("no space left", path="/store", code=NO_SPACE), UNREACHABLE, None]
    bench.clock.after(1500, bench.ends(DONE))
    assert bench.supervise() == "finished"
    assert dict(bench.folder.state().checkpoints) == {"success": 2, "failed": 2}
    assert bench.job.protected == [{"s1"}, {"s1"}, {"s2"}], "after two checkpoints, and the one without space"


def test_a_job_that_ends_during_a_dump_is_not_a_failed_checkpoint(bench: Bench) -> None:
    bench.job.checkpoint_errors = [ProcessNotFound("it is gone", pid=4711)]
    bench.job.during_checkpoint = bench.ends(DONE)
    assert bench.supervise() == "finished"
    assert dict(bench.folder.state().checkpoints) == {}
    assert bench.events("checkpoint-cut-off")[0]["error"].startswith("it is gone")


def test_a_job_damaged_by_a_dump_is_restored(bench: Bench) -> None:
    bench.job.checkpoint_errors = [None, JobDamaged("two processes are gone", failures=["4711"])]
    bench.clock.after(1300, bench.ends(DONE))
    bench.supervise()
    assert bench.job.done == ["checkpoint", "end", "end", "restore s1"]


@pytest.mark.parametrize("when", ["at first", "before a checkpoint", "by a failed checkpoint", "it hangs"])
def test_a_job_that_is_only_locked_is_resumed_and_loses_nothing(bench: Bench, when: str) -> None:
    def lock() -> None:
        bench.job.is_locked = True

    if when == "at first":
        lock()
    elif when == "by a failed checkpoint":
        bench.job.checkpoint_errors = [JobDamaged("it could not be undone: lock", failures=["lock"])]
        bench.job.during_checkpoint = lock
    else:
        bench.clock.after(10, lock)
    bench.clock.after(620 if "checkpoint" in when else 500, bench.ends(DONE))
    assert bench.supervise(output_timeout_s=300.0 if when == "it hangs" else None) == "finished"
    assert bench.job.done == (["resume", "checkpoint"] if "checkpoint" in when else ["resume"])
    assert len(bench.events("resumed")) == 1


def test_a_full_disk_does_not_stop_the_supervisor(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    bench.clock.after(10, lambda: monkeypatch.setattr(durable, "write", full))
    bench.clock.after(700, bench.ends(DONE))
    assert bench.supervise() == "finished"
    assert bench.job.done == ["checkpoint"]


# --- restarts --------------------------------------------------------------------------------------------------


def test_a_dead_job_is_restored_from_its_latest_snapshot(bench: Bench) -> None:
    bench.clock.after(1300, bench.ends(CRASHED))
    bench.clock.after(1400, bench.ends(DONE))
    assert bench.supervise() == "finished"
    assert bench.job.done == ["checkpoint", "checkpoint", "end", "restore s2"]
    assert dict(bench.folder.state().restarts) == {"signal": 1}
    (mark,) = bench.job.log
    assert "signal 9; back to the snapshot s2 of 2027-01-15T08:20:10+00:00" in mark


def test_after_several_failures_from_one_snapshot_the_previous_one_is_used(bench: Bench) -> None:
    bench.clock.after(1300, bench.ends(CRASHED))
    bench.job.on_restore = lambda: bench.clock.after(bench.clock.now - 1000 + 20, bench.ends(CRASHED))
    assert bench.supervise(crashes=2, max_restarts=5) == "gave-up"
    restores = [word for word in bench.job.done if word.startswith("restore")]
    assert restores == ["restore s2", "restore s2", "restore s1", "restore s1"]
    assert "no good snapshot" in bench.events("gave-up")[0]["why"]
    assert bench.job.stored == ["s1", "s2"], "everything is kept"


def test_it_gives_up_after_too_many_restarts_without_a_new_checkpoint(bench: Bench) -> None:
    bench.clock.after(700, bench.ends(CRASHED))
    bench.job.on_restore = lambda: bench.clock.after(bench.clock.now - 1000 + 20, bench.ends(CRASHED))
    assert bench.supervise(crashes=100, max_restarts=4) == "gave-up"
    assert bench.job.done.count("restore s1") == 4
    assert bench.folder.state().phase == "gave-up"


def test_progress_resets_the_restart_count(bench: Bench) -> None:
    bench.job.on_restore = lambda: bench.clock.after(bench.clock.now - 1000 + 700, bench.ends(CRASHED))
    bench.clock.after(700, bench.ends(CRASHED))
    bench.clock.after(20_000, lambda: bench.stop.request("leave"))
    assert bench.supervise(max_restarts=2) == "left"
    assert len([word for word in bench.job.done if word.startswith("restore")]) > 10


class Worked:
    """A job that fails when it has worked for a certain time since its start, from whichever snapshot."""

    def __init__(self, bench: Bench, fails_at: Callable[[int], float]) -> None:
        """``fails_at``: the time, for its first run, its second, ..."""
        self._bench, self._fails_at = bench, fails_at
        self._take = bench.job.checkpoint
        self._at = {"": 0.0}  # how long it had worked, by snapshot
        self._ended_s = bench.clock.now
        self.waits: list[float] = []
        bench.job.checkpoint = self._checkpoint  # type: ignore[method-assign]
        bench.job.on_restore = self._restored
        self._begin("")

    def _begin(self, snapshot: str) -> None:
        self._from_s, self._began_s = self._at[snapshot], self._bench.clock.now
        self._plan_failure()

    def _plan_failure(self) -> None:
        plan = self._bench.clock.plan
        plan[:] = [each for each in plan if each[1] != self._fail]
        left_s = max(0.0, self._fails_at(len(self.waits)) - self._from_s)
        self._bench.clock.after(self._began_s - 1000 + left_s, self._fail)

    def _fail(self) -> None:
        self._bench.job.now = CRASHED
        self._ended_s = self._bench.clock.now

    def _restored(self) -> None:
        self.waits.append(self._bench.clock.now - self._ended_s)
        self._begin(self._bench.job.done[-1].removeprefix("restore ").removeprefix("start again"))

    def _checkpoint(self, *arguments: Any, **options: Any) -> Checkpoint:
        worked_s = self._from_s + self._bench.clock.now - self._began_s
        taken = self._take(*arguments, **options)
        self._at[taken.id] = worked_s
        if self._bench.job.now is RUNNING:
            self._began_s += taken.downtime_s
            self._plan_failure()
        return taken


@pytest.mark.parametrize("crashes", [1, 3, 100])
@pytest.mark.parametrize("every_s", [20.0, 100.0, 390.0, 400.0])
@pytest.mark.parametrize("fails_at_s", [5.0, 395.0, 401.0, 1601.0])
def test_a_job_that_always_fails_at_one_point_is_given_up(
    bench: Bench, every_s: float, fails_at_s: float, crashes: int
) -> None:
    """Also if it takes new checkpoints after restarts from an earlier snapshot."""
    worked = Worked(bench, lambda _: fails_at_s)
    assert bench.supervise(every_s=every_s, crashes=crashes, max_restarts=6, start_again=ANEW) == "gave-up"
    assert 0 < len(worked.waits) <= 6
    assert all(wait_s >= 2.0**number for number, wait_s in enumerate(worked.waits)), "each wait doubles"


def test_a_job_that_comes_further_each_time_is_not_given_up(bench: Bench) -> None:
    worked = Worked(bench, lambda run: (run + 1) * 1000.0)
    bench.clock.after(30_000, lambda: bench.stop.request("leave"))
    assert bench.supervise(every_s=400.0, max_restarts=2) == "left"
    assert len(worked.waits) > 20
    assert max(worked.waits) < 10, "the waits begin from the shortest again"


def test_a_new_supervisor_knows_how_far_the_job_is(bench: Bench) -> None:
    """The job fails after 1000 s; its supervisor is replaced before and after."""
    worked = Worked(bench, lambda _: 1000.0)
    bench.clock.after(700, lambda: bench.stop.request("leave"))
    assert bench.supervise(every_s=300.0, max_restarts=4) == "left"
    bench.clock.pass_by(100)
    for _ in range(2):
        bench.stop = Stop()
        assert bench.supervise(every_s=300.0, max_restarts=4, with_new_settings=False) == "gave-up"
    assert bench.folder.state().failed_at_s == pytest.approx(1000, abs=20)
    assert len(worked.waits) == 4


def test_time_that_the_job_is_lent_is_no_work(bench: Bench) -> None:
    bench.clock.after(100, bench.ends(Look("lent")))
    bench.clock.after(5000, bench.ends(RUNNING))
    bench.clock.after(5100, bench.ends(CRASHED))
    bench.clock.after(5200, bench.ends(DONE))
    bench.supervise(start_again=ANEW)
    assert bench.folder.state().failed_at_s == pytest.approx(200, abs=2)


def test_a_job_that_runs_elsewhere_is_left_alone(bench: Bench) -> None:
    bench.clock.after(700, bench.ends(Look("elsewhere")))
    assert bench.supervise() == "taken-away"
    assert bench.job.done == ["checkpoint"]


def test_a_damaged_snapshot_is_not_tried_twice(bench: Bench) -> None:
    bench.job.restore_errors = [StoreDamaged("a piece is missing", path="/store")]
    bench.clock.after(1300, bench.ends(CRASHED))
    bench.clock.after(1400, bench.ends(DONE))
    assert bench.supervise() == "finished"
    assert bench.job.done[-1] == "restore s1"
    assert bench.events("restore-failed")[0]["code"] == "GPUCR-STORE-DAMAGED"


def test_an_unreachable_store_is_waited_for_without_giving_up(bench: Bench) -> None:
    bench.job.list_errors = [UNREACHABLE] * 50
    bench.clock.after(700, bench.ends(CRASHED))
    bench.clock.after(100_000, bench.ends(DONE))
    assert bench.supervise(max_restarts=3) == "finished"
    assert "restore s1" in bench.job.done
    assert bench.folder.state().restores["failed"] == 50


def test_a_missing_gpu_model_is_reported_and_retried_until_it_gives_up(bench: Bench) -> None:
    bench.job.restore_errors = [Unsupported("there is no H200 here", code="GPUCR-NO-GPU")] * 3
    bench.clock.after(700, bench.ends(CRASHED))
    assert bench.supervise(max_restarts=3) == "gave-up"
    assert [event["code"] for event in bench.events("restore-failed")] == ["GPUCR-NO-GPU"] * 3
    assert bench.job.stored == ["s1"]


def test_before_the_first_checkpoint_the_job_is_restarted(bench: Bench) -> None:
    bench.clock.after(100, bench.ends(CRASHED))
    bench.clock.after(200, bench.ends(DONE))
    assert bench.supervise(start_again=ANEW) == "finished"
    assert bench.job.done == ["end", "start again"]
    assert "started from scratch" in bench.job.log[0]


def test_a_job_that_cannot_be_restarted_is_given_up(bench: Bench) -> None:
    bench.clock.after(100, bench.ends(CRASHED))
    assert bench.supervise() == "gave-up"
    assert bench.job.done == ["end"]


def test_a_clock_jump_changes_neither_interval_nor_order(bench: Bench) -> None:
    def back() -> None:
        bench.clock.wall -= 10 * 86400

    bench.clock.after(700, back)
    bench.clock.after(1300, bench.ends(CRASHED))
    bench.clock.after(1400, bench.ends(DONE))
    bench.job.snapshots = lambda: ["s1", "s2"]  # type: ignore[method-assign]  # by a clock that went back
    bench.supervise()
    assert bench.job.at == pytest.approx([600, 1205])
    assert bench.job.done[-1] == "restore s2"


# --- what hangs ------------------------------------------------------------------------------------------------


def _restarts(bench: Bench, end_s: float = 5000, **settings: Any) -> dict[str, int]:
    bench.clock.after(end_s, bench.ends(DONE))
    bench.supervise(**settings)
    return dict(bench.folder.state().restarts)


def test_a_job_that_prints_nothing_hangs(bench: Bench) -> None:
    bench.job.on_restore = bench.ends(DONE)
    assert _restarts(bench, every_s=100.0, output_timeout_s=300.0) == {"hang-output": 1}
    assert bench.job.at[:2] == pytest.approx([100, 205], abs=1), "the time for checkpoints does not count"
    assert bench.events("failed")[0]["why"] == "it has printed nothing for 300 s"


def test_a_snapshot_of_a_hung_job_is_not_restored(bench: Bench) -> None:
    def prints() -> None:
        bench.job.printed += 10
        if bench.clock.now < 1000 + 250:
            bench.clock.after(bench.clock.now - 1000 + 10, prints)

    prints()
    bench.job.on_restore = bench.ends(DONE)
    assert _restarts(bench, every_s=100.0, output_timeout_s=300.0) == {"hang-output": 1}
    assert len(bench.job.stored) == 5
    assert bench.job.done[-1] == "restore s2", "the others were taken after its last sign of life"


def test_a_job_that_prints_does_not_hang(bench: Bench) -> None:
    def prints() -> None:
        bench.job.printed += 10
        bench.clock.after(bench.clock.now - 1000 + 200, prints)

    prints()
    assert _restarts(bench, output_timeout_s=300.0) == {}


def test_a_job_that_does_not_touch_its_heartbeat_hangs(bench: Bench, tmp_path: Path) -> None:
    beat = tmp_path / "beat"

    def touch() -> None:
        beat.write_text("")
        os.utime(beat, ns=(0, int(bench.clock.now * 1e9)))
        if bench.clock.now < 1000 + 1000:
            bench.clock.after(bench.clock.now - 1000 + 50, touch)

    touch()
    bench.job.on_restore = bench.ends(DONE)
    assert _restarts(bench, heartbeat=str(beat), heartbeat_timeout_s=100.0) == {"hang-heartbeat": 1}
    assert bench.events("failed")[0]["why"].startswith(f"{beat} has not been touched for 100 s")


class _Health:
    """A health command that ends with this code, or never."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9


@pytest.mark.parametrize("code", [1, None])
def test_a_health_command_fails_three_times_or_times_out(bench: Bench, code: int | None) -> None:
    codes: list[int | None] = [0, code, code, 0, code, code, code]
    bench.job.on_restore = bench.ends(DONE)

    def start(command: Sequence[str]) -> _Health:
        assert command == ("check", "it")
        return _Health(codes.pop(0))

    bench.start_health = start
    assert _restarts(bench, every_s=4000.0, health=("check", "it"), start_again=ANEW)["hang-health"] == 1
    assert codes == []


def test_a_health_command_that_cannot_start_counts_as_failed(bench: Bench) -> None:
    def start(command: Sequence[str]) -> _Health:
        raise FileNotFoundError(2, "not there")

    bench.start_health = start
    assert _restarts(bench, health=("check",), start_again=ANEW)["hang-health"] >= 1


def test_idle_gpus_count_as_a_hang_only_on_request(bench: Bench) -> None:
    bench.is_busy = False
    assert _restarts(bench) == {}
    bench.job.now = RUNNING
    assert "hang-gpu" in _restarts(bench, 20_000, gpu_idle_s=120.0)


def test_a_job_leaves_a_failed_gpu(bench: Bench) -> None:
    bench.clock.after(700, lambda: bench.failed_gpus.append(("GPU-7", "Xid 79")))
    bench.clock.after(900, lambda: bench.failed_gpus.append(("GPU-1", "Xid 48")))
    assert _restarts(bench, 1000) == {"gpu": 1}, "that of another job's GPU is noted, and no reason"
    assert bench.job.bad_gpus == {"GPU-1", "GPU-7"}
    assert "Xid 48" in bench.events("failed")[0]["why"]


# --- the end, and a new beginning ------------------------------------------------------------------------------


def test_a_drain_takes_a_last_dump_from_which_the_job_resumes(bench: Bench) -> None:
    bench.clock.after(700, lambda: bench.stop.request("drain"))
    assert bench.supervise() == "draining"
    assert bench.job.done == ["checkpoint", "last dump"]
    again = Bench()
    again.job.now, again.job.stored = bench.job.now, bench.job.stored
    again.clock.after(100, again.ends(DONE))
    assert again.supervise(with_new_settings=False) == "finished"
    assert again.job.done == ["end", "restore s2"]
    assert dict(again.folder.state().restarts) == {"taken-up": 1}
    assert again.folder.state().snapshots[-1].failures == ()


def test_a_failed_drain_leaves_the_job_resumable(bench: Bench) -> None:
    bench.job.checkpoint_errors = [None, UNREACHABLE]
    bench.clock.after(700, lambda: bench.stop.request("drain"))
    assert bench.supervise() == "draining"
    assert bench.job.now == RUNNING
    assert bench.events("drain-failed")[0]["error"] == "the store cannot be reached"


def test_a_supervisor_told_to_leave_keeps_the_job_running(bench: Bench) -> None:
    bench.clock.after(100, lambda: bench.stop.request("leave"))
    assert bench.supervise() == "left"
    assert bench.job.done == []


def test_a_stop_while_waiting_for_a_store_ends_it(bench: Bench) -> None:
    bench.job.list_errors = [UNREACHABLE] * 1000
    bench.clock.after(700, bench.ends(CRASHED))
    bench.clock.after(5000, lambda: bench.stop.request("drain"))
    assert bench.supervise() == "draining"
    assert bench.job.now.word == "failed"


def test_a_lent_job_is_neither_checkpointed_nor_missed(bench: Bench) -> None:
    bench.clock.after(50, bench.ends(Look("lent")))
    bench.clock.after(5000, bench.ends(RUNNING))
    bench.clock.after(5060, bench.ends(DONE))
    assert bench.supervise(output_timeout_s=90.0) == "finished"
    assert bench.job.done == ["checkpoint"], "the one that was due, when it was back"
    assert bench.job.at[0] >= 5000


def test_a_supervisor_of_a_lent_job_can_be_ended(bench: Bench) -> None:
    bench.clock.after(100, bench.ends(Look("lent")))
    bench.clock.after(5000, lambda: bench.stop.request("leave"))
    assert bench.supervise() == "left"
    assert bench.job.done == []


def test_a_job_dumped_by_another_gpucr_is_not_restored(bench: Bench) -> None:
    bench.clock.after(100, bench.ends(Look("dumped")))
    assert bench.supervise() == "taken-away"
    assert bench.job.done == []


def test_after_a_reboot_it_is_restored_and_the_snapshot_is_not_blamed(bench: Bench) -> None:
    bench.clock.after(700, lambda: bench.stop.request("leave"))
    bench.supervise()
    again = Bench()
    again.job.now, again.job.stored = Look("failed", "it ended, and nobody can say how"), bench.job.stored
    again.clock.after(10, again.ends(DONE))
    assert again.supervise(with_new_settings=False) == "finished"
    assert again.job.done == ["end", "restore s1"]
    assert again.folder.state().snapshots[0].failures == ()


def test_every_event_is_a_line_of_json_with_its_time_and_job(bench: Bench) -> None:
    bench.clock.after(700, bench.ends(DONE))
    bench.supervise()
    for line in bench.folder.events_path.read_text().splitlines():
        event = json.loads(line)
        assert event["job"] == "train"
        assert event["time"].startswith("2027-01-15T08:")
    assert [event["event"] for event in bench.events()] == ["supervised", "checkpoint-begin", "checkpoint", "ended"]
