"""A supervisor's loop: wait, check, take a checkpoint, restart. One job, one thread, one thing at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from gpucr.errors import (
    GpucrError,
    JobDamaged,
    RehearsalFailed,
    SnapshotDamaged,
    SnapshotError,
    StoreDamaged,
    StoreError,
)
from gpucr.jobs.sidecar import Journal, as_time
from gpucr.supervise import policy
from gpucr.supervise.clock import Clock, Stop
from gpucr.supervise.folder import MOST_SNAPSHOTS, Phase, SupervisedState, Taken
from gpucr.supervise.job import Checkpoint, Look, SupervisedJob
from gpucr.supervise.settings import Supervision
from gpucr.supervise.watch import Watch

POLL_S = 0.5
"""How often to check the job."""

_NO_SPACE = "GPUCR-NO-SPACE"
_UNREACHABLE = 5
"""An unreachable store counts as this attempt: the fifth, with a wait 16 times as long as the first."""

GpuFailures = Callable[[], Sequence[tuple[str, str]]]
"""Failures since the last call: GPU UUIDs, and what NVML said about them."""


class Supervisor:
    """Keeps one job alive, until it has ended with exit code 0, cannot be kept alive, or a stop is requested."""

    def __init__(
        self,
        job: SupervisedJob,
        settings: Supervision,
        journal: Journal[SupervisedState],
        watch: Watch,
        *,
        clock: Clock,
        random: policy.Random,
        stop: Stop,
        gpu_failures: GpuFailures,
    ) -> None:
        self._job = job
        self._settings = settings
        self._journal = journal
        self._watch = watch
        self._clock = clock
        self._random = random
        self._stop = stop
        self._gpu_failures = gpu_failures
        self._due_s = 0.0
        self._restoring = ""
        self._worked_s = 0.0
        self._looked_s = clock.now_s()

    def run(self) -> Phase:
        """Supervise. Returns what became of the job, which is also in the state."""
        was = self._journal.state.phase
        self._journal.tell("supervised", store=self._settings.store)
        self._plan_next()
        self._worked_s = self._worked_so_far()
        found = self._look()
        if found.word == "failed" or (found.word == "dumped" and was == "draining"):
            phase = self._restart("taken-up", found.reason or "drained", is_its_fault=False)
            if phase is not None:
                return self._end(phase)
        self._resume()
        self._journal.update(phase="supervised")  # not earlier: until then a drained job is recognised as one
        while True:
            phase = self._turn()
            if phase is not None:
                return self._end(phase)

    def _turn(self) -> Phase | None:
        """Wait, and do what is next. Returns the job's fate if nothing is left to do."""
        if self._stop.wish is None:
            self._clock.wait(min(POLL_S, max(0.0, self._due_s - self._clock.now_s())), self._stop)
        found = self._look()
        if found.word == "done":
            return "finished"
        if found.word in ("dumped", "elsewhere"):
            return "taken-away"
        if self._stop.wish == "leave":
            return "left"
        if found.word == "lent" and self._stop.wish is None:
            self._watch.begin_again()  # stopped or dumped: being idle is no hang
            self._due_s = max(self._due_s, self._clock.now_s() + POLL_S)
            return None
        if self._stop.wish == "drain":
            return self._drain()
        if found.word == "failed":
            return self._restart(found.kind, found.reason)
        failed = self._gpu_failures()
        if failed:
            bad = {*self._journal.state.bad_gpus, *(uuid for uuid, _ in failed)}
            self._journal.update(bad_gpus=tuple(sorted(bad)))
            if not {uuid for uuid, _ in failed}.isdisjoint(self._job.gpus()):
                return self._restart("gpu", "; ".join(f"GPU {uuid}: {what}" for uuid, what in failed))
        trouble = self._watch.trouble()
        if trouble is not None and not self._resume():
            hung_s = self._watch.hung_for_s(trouble[0])
            self._suspect(hung_s)
            self._worked_s = max(0.0, self._worked_s - hung_s)
            return self._restart(*trouble)
        if self._clock.now_s() >= self._due_s:
            self._checkpoint()
        return None

    # --- how far it is -----------------------------------------------------------------------------------------

    def _look(self) -> Look:
        """The job's state; the time since the last look is work, unless it is lent."""
        found, now_s = self._job.look(), self._clock.now_s()
        if found.word != "lent":
            self._worked_s += now_s - self._looked_s
        self._looked_s = now_s
        return found

    def _worked_so_far(self) -> float:
        """How long the job has worked, as an earlier supervisor knew it; since then it has worked all the time."""
        state = self._journal.state
        if state.worked_at_s is None:
            return 0.0
        return state.worked_s + max(0.0, self._clock.wall_s() - state.worked_at_s)

    def _is_as_of(self, snapshot: str | None) -> None:
        """The job is as it was in this snapshot; None: at its start."""
        known = {each.id: each.worked_s for each in self._journal.state.snapshots}
        newest_s = max(known.values(), default=0.0)  # one that is not known was committed by a killed supervisor
        self._worked_s, self._looked_s = known.get(snapshot, newest_s) if snapshot else 0.0, self._clock.now_s()
        self._journal.update(restored_from=snapshot, worked_s=self._worked_s, worked_at_s=self._clock.wall_s())

    # --- checkpoints -------------------------------------------------------------------------------------------

    def _plan_next(self) -> None:
        state, settings = self._journal.state, self._settings
        interval_s = policy.interval_s(settings.every_s, state.downtime_s, settings.mtbf_s, state.checkpoint_s or 0.0)
        self._plan(policy.jittered(interval_s, self._random), interval_s)

    def _plan(self, wait_s: float, interval_s: float) -> None:
        self._due_s = self._clock.now_s() + wait_s
        self._journal.update(interval_s=interval_s, next_checkpoint_s=self._clock.wall_s() + wait_s)

    def _checkpoint(self) -> None:
        """Take one. On failure the job keeps running, and it is retried soon."""
        self._resume()
        self._journal.tell("checkpoint-begin")
        began_s = self._clock.now_s()
        try:
            taken = self._job.checkpoint(self._stop.cancel)
        except (GpucrError, OSError) as e:
            self._failed_checkpoint(e)
        else:
            self._taken(taken)
            self._plan_next()
            self._rehearse(taken.id)
            self._prune()
        self._watch.stood_still(self._clock.now_s() - began_s)

    def _failed_checkpoint(self, error: GpucrError | OSError) -> None:
        if self._stop.wish is not None or self._job.look().word != "running":
            self._journal.tell("checkpoint-cut-off", error=str(error))  # because of the stop, or the job's end
            return
        self._journal.count("checkpoints", "failed")
        failed = self._journal.state.failed_checkpoints_in_a_row + 1
        self._journal.update(failed_checkpoints_in_a_row=failed)
        interval_s = self._journal.state.interval_s or self._settings.backoff_most_s
        most_s = min(self._settings.backoff_most_s, interval_s)
        wait_s = policy.backoff_s(failed, self._random, first_s=self._settings.backoff_first_s, most_s=most_s)
        self._journal.tell("checkpoint-failed", **_told(error), again_in_s=round(wait_s, 3))
        self._plan(wait_s, interval_s)
        if isinstance(error, GpucrError) and error.code == _NO_SPACE:
            self._prune()  # a prune follows each checkpoint: without this one, space would never come back
        if isinstance(error, JobDamaged) and not self._resume():
            self._job.end()  # the rest is no job any more; the next check finds that it has failed

    def _taken(self, taken: Checkpoint) -> None:
        state = self._journal.state
        now_s, worked_s = self._clock.wall_s(), self._worked_s
        self._worked_s = max(0.0, worked_s - taken.downtime_s)  # the next look counts all of the time
        is_progress = policy.made_progress(worked_s, state.failed_at_s, taken.seconds)
        self._journal.count("checkpoints", "success")
        self._journal.update(
            snapshots=(*state.snapshots, Taken(taken.id, now_s, worked_s))[-MOST_SNAPSHOTS:],
            worked_s=worked_s,
            worked_at_s=now_s,
            last_checkpoint_s=now_s,
            downtime_s=policy.smoothed(state.downtime_s, taken.downtime_s),
            checkpoint_s=policy.smoothed(state.checkpoint_s, taken.seconds),
            snapshot_bytes={"whole": taken.size_bytes, "written": taken.written_bytes},
            restarts_in_a_row=0 if is_progress else state.restarts_in_a_row,
            failed_checkpoints_in_a_row=0,
        )
        self._journal.tell(
            "checkpoint",
            snapshot=taken.id,
            downtime_s=round(taken.downtime_s, 3),
            seconds=round(taken.seconds, 3),
            size_bytes=taken.size_bytes,
            written_bytes=taken.written_bytes,
        )

    def _rehearse(self, snapshot: str) -> None:
        """Rehearse it if that is due, while the job runs. A rehearsal that cannot be held says nothing about it."""
        state, every = self._journal.state, self._settings.rehearse
        taken = [each.id for each in state.snapshots]
        if every is None or self._stop.wish is not None or not policy.rehearsal_is_due(taken, state.rehearsed, every):
            return
        try:
            seconds = self._job.rehearse(snapshot, self._stop.cancel)
        except (GpucrError, OSError) as e:
            is_bad = isinstance(e, RehearsalFailed | SnapshotDamaged | StoreDamaged)
            self._rehearsed("failed" if is_bad else "not-held", snapshot, comes_back=False if is_bad else None)
            self._journal.tell("rehearsal-failed", snapshot=snapshot, comes_back=False if is_bad else None, **_told(e))
            return
        self._rehearsed("success", snapshot, comes_back=True)
        self._journal.tell("rehearsed", snapshot=snapshot, seconds=round(seconds, 3))

    def _rehearsed(self, result: str, snapshot: str, *, comes_back: bool | None) -> None:
        self._journal.count("rehearsals", result)
        if comes_back is not None:
            self._journal.update(rehearsed={**self._journal.state.rehearsed, snapshot: comes_back})

    def _prune(self) -> None:
        """Prune snapshots; never the last verified one, nor the one that the job was restored from.

        With rehearsals: nor those that are newer than the last one that came back.
        """
        state, counted = self._journal.state, None
        protected = {each.id for each in state.snapshots[-1:]} | ({state.restored_from} - {None})
        try:
            if self._settings.rehearse is not None:
                in_store = list(self._job.snapshots())
                self._journal.update(rehearsed={id_: good for id_, good in state.rehearsed.items() if id_ in in_store})
                counted, newer = policy.counted(state.rehearsed, in_store)
                protected |= set(newer)
            removed = self._job.prune([each for each in protected if each is not None], counted)
        except (GpucrError, OSError) as e:
            self._journal.tell("prune-failed", **_told(e))
            return
        if removed:
            self._journal.tell("pruned", removed=removed)

    def _resume(self) -> bool:
        """A job that a killed or failed gpucr left locked is resumed, which loses nothing. False: it was not."""
        if not self._job.resume():
            return False
        self._journal.tell("resumed")
        self._watch.begin_again()
        return True

    # --- restarts ----------------------------------------------------------------------------------------------

    def _restart(self, reason: str, why: str, *, is_its_fault: bool = True) -> Phase | None:
        """End the rest of the job and restart it. Returns the phase if that is not done."""
        self._journal.tell("failed", reason=reason, why=why)
        self._journal.count("restarts", reason)
        if is_its_fault:
            self._blame()
            self._journal.update(failed_at_s=max(self._journal.state.failed_at_s, self._worked_s))
        self._job.end()
        gone: set[str] = set()
        while True:
            state = self._journal.state
            if state.restarts_in_a_row >= self._settings.max_restarts:
                why = f"{state.restarts_in_a_row} restarts, and no checkpoint beyond the point where it failed"
                self._journal.tell("gave-up", why=why)
                return "gave-up"
            if state.restarts_in_a_row or is_its_fault:
                self._back_off(state.restarts_in_a_row + 1)
            if self._stop.wish is not None:
                return "draining" if self._stop.wish == "drain" else "left"
            self._journal.update(restarts_in_a_row=state.restarts_in_a_row + 1)
            try:
                if self._bring_back(why, gone):
                    self._watch.begin_again()
                    self._plan_next()
                    return None
            except (GpucrError, OSError) as e:
                self._failed_restore(e, gone)
                continue
            self._journal.tell("gave-up", why="there is no good snapshot, and the job cannot be started again")
            return "gave-up"

    def _back_off(self, attempt: int) -> None:
        settings = self._settings
        first_s, most_s = settings.backoff_first_s, settings.backoff_most_s
        end_s = self._clock.now_s() + policy.backoff_s(attempt, self._random, first_s=first_s, most_s=most_s)
        while self._stop.wish is None and self._clock.now_s() < end_s:
            self._clock.wait(end_s - self._clock.now_s(), self._stop)

    def _blame(self) -> None:
        """Record that the job has failed after a restore from this snapshot."""
        state, now_s = self._journal.state, self._clock.wall_s()
        snapshots = tuple(
            replace(each, failures=(*each.failures[-9:], now_s)) if each.id == state.restored_from else each
            for each in state.snapshots
        )
        if state.restored_from is not None and all(each.id != state.restored_from for each in state.snapshots):
            snapshots = (Taken(state.restored_from, now_s, 0.0, (now_s,)), *snapshots)
        self._journal.update(snapshots=snapshots)

    def _suspect(self, hung_s: float) -> None:
        """The job has hung for this long: snapshots taken meanwhile would hang too. Exclude them."""
        state, now_s = self._journal.state, self._clock.wall_s()
        failures = (now_s,) * self._settings.crashes
        snapshots = tuple(
            replace(each, failures=failures) if each.created_s > now_s - hung_s else each for each in state.snapshots
        )
        self._journal.update(snapshots=snapshots)

    def _bring_back(self, why: str, gone: set[str]) -> bool:
        """From the best snapshot, or from the start if there never was one. False: there is nothing to restart from."""
        state, settings = self._journal.state, self._settings
        in_store = list(self._job.snapshots())
        known = [each.id for each in reversed(state.snapshots) if each.id in in_store]
        newest_first = [each for each in policy.newest_first(known, in_store) if each not in gone]
        newest_first.sort(key=lambda each: state.rehearsed.get(each) is False)  # only if there is no other
        chosen = policy.choose_snapshot(
            newest_first,
            {each.id: each.failures for each in state.snapshots},
            self._clock.wall_s(),
            crashes=settings.crashes,
            window_s=settings.crash_window_s,
        )
        if chosen is not None:
            self._restore(chosen, why)
            return True
        if newest_first or gone or settings.start_again is None:
            return False
        self._job.start_again(settings.start_again)
        self._is_as_of(None)
        self._journal.update(started_over=state.started_over + 1)
        self._job.mark(f"{as_time(self._clock.wall_s())}: {why}; there was no snapshot yet: started from scratch")
        self._journal.tell("started-over")
        return True

    def _restore(self, snapshot: str, why: str) -> None:
        when = next((each.created_s for each in self._journal.state.snapshots if each.id == snapshot), None)
        of = f" of {as_time(when)}" if when is not None else ""
        self._journal.tell("restore-begin", snapshot=snapshot)
        # Before the job can print: what follows in the log was printed after the restart.
        self._job.mark(f"{as_time(self._clock.wall_s())}: {why}; back to the snapshot {snapshot[:8]}{of}")
        self._restoring = snapshot
        warnings = self._job.restore(snapshot, self._stop.cancel, bad_gpus=self._journal.state.bad_gpus)
        self._is_as_of(snapshot)
        self._journal.count("restores", "success")
        self._journal.tell("restored", snapshot=snapshot, warnings=list(warnings))

    def _failed_restore(self, error: GpucrError | OSError, gone: set[str]) -> None:
        """Waits indefinitely for an unreachable store; a damaged snapshot is not tried again."""
        if self._stop.wish is not None:
            return
        self._journal.count("restores", "failed")
        self._journal.tell("restore-failed", **_told(error))
        if isinstance(error, StoreDamaged) or (isinstance(error, SnapshotError) and not isinstance(error, StoreError)):
            gone.add(self._restoring)
        elif isinstance(error, StoreError):
            self._journal.update(restarts_in_a_row=self._journal.state.restarts_in_a_row - 1)
            self._back_off(_UNREACHABLE)
        self._job.end()

    # --- the end -----------------------------------------------------------------------------------------------

    def _drain(self) -> Phase:
        """The machine is going away: a last dump, which ends the job, so that it can continue elsewhere or later."""
        self._journal.update(phase="draining")
        self._journal.tell("drain-begin", grace_s=self._settings.grace_s)
        try:
            taken = self._job.checkpoint(self._stop.cancel_last, end=True, timeout_s=self._settings.grace_s)
        except (GpucrError, OSError) as e:
            self._journal.count("checkpoints", "failed")
            self._journal.tell("drain-failed", **_told(e))
            return "draining"
        self._taken(taken)
        return "draining"

    def _end(self, phase: Phase) -> Phase:
        self._journal.update(phase=phase, process=None, next_checkpoint_s=None)
        self._journal.tell("ended", phase=phase)
        return phase


def _told(error: GpucrError | OSError) -> dict[str, str | None]:
    return {
        "error": str(error),
        "code": error.code if isinstance(error, GpucrError) else None,
        "hint": error.hint if isinstance(error, GpucrError) else None,
    }
