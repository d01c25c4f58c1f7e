"""The driver's four actions over a gang: the CUDA processes of a job, handled as one.

Every action runs in all processes at once, one thread each, because the driver works on different processes in parallel
(two 8 GiB processes: 3.0 s together, 7.4 s one after the other). A failure in one process does not stop the others
midway: all calls are awaited, then the first error is raised and the caller undoes.

The states form a ladder, RUNNING - LOCKED - CHECKPOINTED, and each member remembers the rung on which it was found. So
an undo never replays what was done: it checks where each process is now and takes the steps back to where it was found.
This works wherever an operation was cut off.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from gpucr.driver.api import Driver
from gpucr.driver.libcuda import NOT_READY
from gpucr.errors import DeadlineExceeded, GpucrError, IllegalState, JobChanged, LockTimeout, reason_of
from gpucr.gang.around import Around
from gpucr.gang.discovery import uses_libcuda
from gpucr.gang.hold_leader import LeaderHold, LocksFailed
from gpucr.gang.holdable import MAX_LOCK_TIMEOUT_MS, DriverLock, Others
from gpucr.interposer.foreign import require_own
from gpucr.linux import processes
from gpucr.model import CudaState, GangLock, GangMember, GpuMap

DEFAULT_LOCK_TIMEOUT_S = 30.0
"""How long a lock waits for pending GPU work without a user's deadline."""

STUCK_AFTER_S = 120.0
"""How long to wait for a call after the deadline: the driver cannot cancel one.

A call that begins after the deadline, as in an undo, gets this time from its own start.
"""

_LADDER = (CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED)


class Gang:
    """The CUDA processes of one job. ``deadline`` is a time.monotonic() value, or None for no limit.

    ``around``: what surrounds the driver's actions. ``others``: ranks of other nodes that have to be held at the same
    time as the first of these. ``first_lock`` says how they were locked; processes added later are locked separately.
    """

    def __init__(
        self,
        driver: Driver,
        members: Sequence[GangMember],
        *,
        deadline: float | None = None,
        around: Around | None = None,
        others: Others | None = None,
    ) -> None:
        self.driver = driver
        self.deadline = deadline
        self._around = around if around is not None else Around()
        self._others = others
        self._members = {member.pid: member for member in members}
        self._stuck: dict[int, str] = {}
        self.first_lock: GangLock | None = None

    @property
    def members(self) -> tuple[GangMember, ...]:
        """All members, in the order in which they were found."""
        return tuple(self._members.values())

    def add(self, members: Iterable[GangMember]) -> None:
        """Add processes that began to use CUDA after the gang was discovered."""
        for member in members:
            self._members.setdefault(member.pid, member)

    def settle(self, found: Callable[[GangMember], CudaState]) -> None:
        """Replace the members' found states: from now on an undo leads to this one."""
        self._members = {pid: replace(each, found=found(each)) for pid, each in self._members.items()}

    def state(self, pid: int) -> CudaState | None:
        """The current state. None if the process has ended or has executed another program.

        Raises JobChanged if a process that used CUDA appears not to: the driver also answers so when it could not look
        (seen without free descriptors), and an unknown state must never count as done.
        """
        process = self._members[pid].id
        if not processes.keeps_running(process):
            return None
        try:
            state = self.driver.state(pid)
        except GpucrError:
            if processes.keeps_running(process):
                raise
            return None  # it ended between the two queries
        if state is None and uses_libcuda(pid) and processes.keeps_running(process):
            raise JobChanged(
                f"the driver does not tell the state of process {pid} any more",
                pids=[pid],
                hint=f"see what `gpucr state {pid}` says, and whether the process itself reports an error",
            )
        return state

    def is_stuck(self, pid: int) -> bool:
        """Whether a driver call on this process never returned: querying its state could hang too."""
        return pid in self._stuck

    def restore_threads(self) -> dict[int, int]:
        """The restore thread, by pid. Raises JobChanged if a process has ended."""
        try:
            return {member.pid: self.driver.restore_thread_id(member.pid) for member in self.members}
        except GpucrError:
            self._require_all_alive("checkpoint")
            raise

    def lift_deadline(self) -> None:
        """From now on no action is late."""
        self.deadline = None

    def lock(self, check: Callable[[], None] = lambda: None) -> GangLock:
        """RUNNING → LOCKED for every running member; members found LOCKED or CHECKPOINTED are left alone.

        Several are locked by holding the leader (hold_leader.py), because they may wait for each other. ``check`` is
        called often meanwhile, and may raise to end it. On failure, all that were running run again.

        Raises LockTimeout if GPU work is pending for longer than the deadline (30 s if there is none).
        """
        begin = time.monotonic()
        left_s = DEFAULT_LOCK_TIMEOUT_S if self.deadline is None else self.deadline - begin
        if left_s <= 0:
            raise DeadlineExceeded("timed out before the job was locked", hint="give a longer --timeout")
        states, errors = self._states(self._members)
        if errors:
            raise self._explain("lock", CudaState.RUNNING, errors)
        running = [pid for pid, state in states.items() if state is CudaState.RUNNING]
        lock = self._lock(running, (), begin + left_s, check)
        self.first_lock = self.first_lock or lock
        return lock

    def _lock(
        self, running: Sequence[int], locked: Sequence[int], end: float, check: Callable[[], None] = lambda: None
    ) -> GangLock:
        """Lock the running ones; those of ``locked`` are locked already, and may be released for a moment."""
        begin = time.monotonic()
        if len(running) + len(locked) > 1 or self._others is not None:
            return self._hold_leader(running, locked, end, check)
        self._everywhere("lock", CudaState.RUNNING, lambda pid: self._hold(pid, end), running)
        return GangLock(len(running), 1, time.monotonic() - begin)

    def _hold(self, pid: int, end: float) -> None:
        rank, left_s = self._around.rank(pid), end - time.monotonic()
        if rank is None:
            # Rounded up: a lock that times out before the deadline would be reported as one without a limit.
            self.driver.lock(pid, max(1, math.ceil(min(left_s * 1000, MAX_LOCK_TIMEOUT_MS))))
        elif not rank.hold(left_s):
            raise LockTimeout(
                f"process {pid} still {rank.pending} when the time for its lock was over",
                pid=pid, action="lock", result=NOT_READY,
            )  # fmt: skip

    def _states(self, pids: Iterable[int]) -> tuple[dict[int, CudaState | None], dict[int, Exception]]:
        """The current states, each queried in its own thread, and the errors of failed queries."""
        states: dict[int, CudaState | None] = {}

        def ask(pid: int) -> None:
            states[pid] = self.state(pid)

        chosen = [pid for pid in pids if pid not in self._stuck]
        errors = self._call_in_parallel("lock", ask, chosen)
        return {pid: states[pid] for pid in chosen if pid not in errors}, errors

    def _hold_leader(
        self, running: Sequence[int], locked: Sequence[int], end: float, check: Callable[[], None]
    ) -> GangLock:
        ranks = [self._around.rank(pid) or DriverLock(self.driver, pid) for pid in (*running, *locked)]
        others, self._others = self._others, None  # those who use CUDA later are locked here alone
        hold = LeaderHold(ranks, end=end, stuck_after_s=STUCK_AFTER_S, locked=locked, check=check, others=others)
        try:
            return hold.lock()
        except LocksFailed as failed:
            errors = failed.errors | {pid: _unfinished(pid, "lock") for pid in hold.stuck}
        finally:
            self._stuck.update(dict.fromkeys(hold.stuck, "lock"))
        raise self._explain("lock", CudaState.RUNNING, errors)

    def checkpoint(self) -> None:
        """LOCKED → CHECKPOINTED for every member that is locked."""
        self._everywhere("checkpoint", CudaState.LOCKED, self._checkpoint)
        self._require_all_alive("checkpoint")

    def _checkpoint(self, pid: int) -> None:
        require_own(pid, may_be_silent=True)  # preflight has refused a silent one, unless it was overruled
        self.driver.checkpoint(pid)

    def restore(
        self, gpu_maps: Mapping[int, GpuMap] | None = None, *, down_to: Callable[[GangMember], CudaState]
    ) -> None:
        """CHECKPOINTED → LOCKED for every member whose ``down_to`` state is below CHECKPOINTED.

        ``gpu_maps``: by pid, for those that go to other GPUs.
        """
        maps = gpu_maps or {}
        wanted = [m.pid for m in self.members if _below(down_to(m), CudaState.CHECKPOINTED)]
        others = self._around.bring_back(self, {pid: maps.get(pid) for pid in wanted if pid not in self._stuck})
        errors = {pid: error for pid, error in others.items() if error is not None}
        wanted = [pid for pid in wanted if pid not in others]
        away = [pid for pid, state in self._states(wanted)[0].items() if state is CudaState.CHECKPOINTED]
        if away:
            self._around.before_restore(self, away)
        self._everywhere("restore", CudaState.CHECKPOINTED, lambda pid: self.driver.restore(pid, maps.get(pid)), wanted)
        if errors:
            raise self._explain("restore", CudaState.CHECKPOINTED, errors)

    def unlock(self, *, down_to: Callable[[GangMember], CudaState]) -> None:
        """LOCKED → RUNNING for every member whose ``down_to`` state is RUNNING, after `Around.before_unlock`."""
        self._around.before_unlock(self)
        wanted = [m.pid for m in self.members if down_to(m) is CudaState.RUNNING]
        self._everywhere("unlock", CudaState.LOCKED, self._unlock_unless_ended, wanted)

    def _unlock_unless_ended(self, pid: int) -> None:
        """Running ones may be about to end, and to end the rest of the job: that is no failure."""
        try:
            (self._around.rank(pid) or DriverLock(self.driver, pid)).release()
        except GpucrError:
            if processes.keeps_running(self._members[pid].id):
                raise

    def return_to_found(self) -> None:
        """Bring every living member back to the state in which it was found, from wherever it is now.

        Each member is tried even if another one fails. Raises the first error afterwards; a process that has ended is
        no error.
        """
        errors: list[GpucrError | OSError] = []
        ways: tuple[Callable[[], None], ...] = (
            lambda: self.restore(down_to=lambda member: member.found),
            lambda: self.unlock(down_to=lambda member: member.found),
            self._climb_back,
        )
        for way in ways:
            try:
                way()
            except (GpucrError, OSError) as error:
                errors.append(error)
        wrong = [m for m in self.members if m.pid in self._stuck or self._is_off(m)]
        if wrong:
            names = ", ".join(f"{m.pid} ({self._where(m)}, was {m.found.word})" for m in wrong)
            raise errors[0] if errors else JobChanged(f"not as found: {names}", pids=[m.pid for m in wrong])

    def wait_for_calls(self) -> None:
        """As found → as found, after waiting for calls that a dead gpucr had begun.

        Calls, for each member, the action that leads to its found state. The driver serializes calls on one process, so
        the answer comes after theirs, and it refuses (CUDA_ERROR_ILLEGAL_STATE, nothing changed) if the process is
        there already. Raises JobChanged if one of those calls has led a member elsewhere.
        """
        ways: dict[CudaState, Callable[[int], None]] = {
            CudaState.RUNNING: self.driver.unlock,
            CudaState.LOCKED: self.driver.restore,
            CudaState.CHECKPOINTED: self.driver.checkpoint,
        }

        def ask(pid: int) -> None:
            with contextlib.suppress(IllegalState):
                ways[self._members[pid].found](pid)

        alive = [m.pid for m in self.members if m.found in ways and processes.keeps_running(m.id)]
        errors = self._call_in_parallel("return", ask, alive)
        for pid, error in errors.items():
            if processes.keeps_running(self._members[pid].id):
                raise error
        wrong = [m for m in self.members if self._is_off(m)]
        if wrong:
            names = ", ".join(f"{m.pid} ({self._where(m)}, was {m.found.word})" for m in wrong)
            raise JobChanged(f"not as found: {names}", pids=[m.pid for m in wrong])

    def _climb_back(self) -> None:
        """Lock and checkpoint members again that are now below their found state (the undo of a resume)."""
        found_above = [m.pid for m in self.members if m.found in (CudaState.LOCKED, CudaState.CHECKPOINTED)]
        checkpointed = [m.pid for m in self.members if m.found is CudaState.CHECKPOINTED]
        states, errors = self._states(found_above)
        running = [pid for pid, state in states.items() if state is CudaState.RUNNING]
        # Running ones may wait for one that does not run yet, and that was to run too.
        locked = [pid for pid in checkpointed if states.get(pid) is CudaState.LOCKED]
        if running:
            self._lock(running, locked, time.monotonic() + DEFAULT_LOCK_TIMEOUT_S)
        if errors:
            raise self._explain("lock", CudaState.RUNNING, errors)
        self._everywhere("checkpoint", CudaState.LOCKED, self._checkpoint_again, checkpointed)

    def _checkpoint_again(self, pid: int) -> None:
        self._around.before_climb(self, pid)
        require_own(pid, may_be_silent=False)
        self.driver.checkpoint(pid)

    def _require_all_alive(self, action: str) -> None:
        """Raise JobChanged if a member ended although no driver call failed: before the call, or right after it."""
        ended = [member.pid for member in self.members if not processes.keeps_running(member.id)]
        if ended:
            raise _ended(ended, action)

    def _is_off(self, member: GangMember) -> bool:
        try:
            state = self.state(member.pid)
        except (GpucrError, OSError):
            return True  # a process that cannot be queried is not known to be as it was found
        return state is not None and state != member.found

    def _where(self, member: GangMember) -> str:
        if member.pid in self._stuck:
            return f"the driver still works on its {self._stuck[member.pid]}"
        try:
            state = self.state(member.pid)
        except (GpucrError, OSError) as error:
            return f"state not known: {reason_of(error)}"
        return state.word if state is not None else "ended"

    def _everywhere(
        self, action: str, before: CudaState, call: Callable[[int], None], pids: Sequence[int] | None = None
    ) -> None:
        """Run one action concurrently in all members (or those of ``pids``) that are in its start state.

        Each member's thread queries the state: a query that fails or hangs must not stop the others.
        """

        def call_where_it_fits(pid: int) -> None:
            if self.state(pid) is before:
                call(pid)

        chosen = [pid for pid in (self._members if pids is None else pids) if pid not in self._stuck]
        errors = self._call_in_parallel(action, call_where_it_fits, chosen)
        if errors:
            raise self._explain(action, before, errors)

    def _call_in_parallel(self, action: str, call: Callable[[int], None], pids: Sequence[int]) -> dict[int, Exception]:
        """One thread per process. Waits for all of them: a driver call cannot be cancelled."""
        results: queue.SimpleQueue[tuple[int, Exception | None]] = queue.SimpleQueue()

        def work(pid: int) -> None:
            try:
                call(pid)
            except Exception as error:  # noqa: BLE001 - passed to the waiting thread, which raises it
                results.put((pid, error))
            else:
                results.put((pid, None))

        for pid in pids:
            try:
                threading.Thread(target=work, args=(pid,), name=f"{action}-{pid}", daemon=True).start()
            except (RuntimeError, MemoryError):  # no more threads: do it one after the other, so that no undo fails
                work(pid)
        pending, errors = set(pids), {}
        hopeless_at = math.inf
        if self.deadline is not None:
            hopeless_at = max(self.deadline, time.monotonic()) + STUCK_AFTER_S
        while pending and time.monotonic() <= hopeless_at:
            try:
                pid, error = results.get(timeout=0.2)
            except queue.Empty:
                continue
            pending.discard(pid)
            if error is not None:
                errors[pid] = error
        for pid in pending:
            self._stuck[pid] = action
            errors[pid] = _unfinished(pid, action)
        return errors

    def _explain(self, action: str, before: CudaState, errors: dict[int, Exception]) -> Exception:
        """The one error to raise: what happened to the job, if known, rather than what the driver said."""
        ended = [pid for pid in errors if not processes.keeps_running(self._members[pid].id)]
        if ended:
            explained: Exception = _ended(ended, action)
            explained.__cause__ = errors[ended[0]]
            return explained
        pid, first = next(iter(errors.items()))
        if isinstance(first, IllegalState):
            explained = JobChanged(
                f"process {pid} left the state {before.word} while its {action} was prepared",
                pids=[pid],
                hint="another tool (cuda-checkpoint, CRIU's plugin, a second gpucr) works on this job",
            )
            explained.__cause__ = first
            return explained
        if isinstance(first, LockTimeout) and self.deadline is not None and time.monotonic() >= self.deadline:
            explained = DeadlineExceeded(
                f"timed out before all GPU work was done: {first.message}",
                hint="give a longer --timeout, or try again when the work is done",
            )
            explained.__cause__ = first
            return explained
        return first


def _below(state: CudaState, other: CudaState) -> bool:
    return state in _LADDER and _LADDER.index(state) < _LADDER.index(other)


def _unfinished(pid: int, action: str) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the driver has not finished the {action} of process {pid}",
        hint=f"it cannot be cancelled; look at `gpucr state {pid}` later and bring it back with `gpucr resume`",
    )


def _ended(pids: Sequence[int], action: str) -> JobChanged:
    names = ", ".join(map(str, pids))
    return JobChanged(
        f"process {names} ended during the {action}", pids=pids, hint="the rest of the job is as it was found"
    )
