"""Lock processes that wait for each other on the GPU (NCCL ranks), by holding the leader.

A locked rank submits nothing, so collectives that its peers have submitted never complete, and their locks stay
pending: locking ranks one after the other, or all at once, mostly fails. But the lock itself shows each rank's
position. A locked rank has nothing pending: no rank is further behind. One whose lock stays pending is *ahead*: it
waits for the others. So all are locked at once; then, repeatedly, the locked ones are released for a moment and locked
again, while pending locks hold those ahead where they are. The others catch up with the leader, and pass it by no more
than they submit in that moment. docs/adr/0011 has the argument that this terminates, its assumptions, and the worst
cases.

Each rank has a thread here, because a hold blocks and cannot be cancelled; one more thread decides. They are urgent: on
a busy machine a released rank would run on while the call that is to stop it waits for a processor. How a rank is held
is up to it (holdable.py): here "locked" means held by the driver, by a gate, or by both.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence

from msgspec import Struct, field

from gpucr.driver.libcuda import NOT_READY
from gpucr.errors import GpucrError, LockTimeout
from gpucr.gang.holdable import Holdable, Others
from gpucr.linux.priority import urgent
from gpucr.model import GangLock

FIRST_PATIENCE_S = 0.005
"""If nothing changes for this long, with one locked and one pending, the pending one is ahead.

A lock alone takes 0.2 to 3 ms.
"""

PATIENCE_PER_PROCESS_S = 0.0001

PATIENCE_WEARS_OFF = 0.75
"""After a busy rank the quiet time is longer; each useless wait makes it shorter again."""

FIRST_HOLD_S = 0.001
"""How long released ranks run at first, beyond what the two calls take."""

LEAST_GROWING_HOLD_S = 0.00025

PASSES_BEFORE_A_NEW_START = 4
"""If the released ones pass the leaders this often, their steps are shorter than a driver call.

Then all are released, for NEW_START_LIMIT_S at most, and locked at once: that probably finds ranks in lockstep in the
same step.
"""

TOO_FAR_BEFORE_A_NEW_START = 12
"""The same if it does not help to release fewer."""

RELEASED_PER_PROCESSOR = 4
"""At least so many are released at once. More than the processors can run soon run for longer than the hold.

They wait for a processor, and then so does the call that is to stop them: some always pass the others.
"""

NEW_START_LIMIT_S = 0.1

FIRST_CALL_LIMIT_S = 2.0
"""How long one lock call may stay pending. A call that times out releases the leader for a moment, so this doubles."""

_LOOK_EVERY_S = 0.05


class LocksFailed(Exception):
    """Not all could be locked. ``errors`` by pid; every process is running again or has an error."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        super().__init__(errors)
        self.errors = errors


class _Rung(enum.Enum):
    """A rank's state between our calls."""

    RUNNING = enum.auto()
    LOCKED = enum.auto()
    UNKNOWN = enum.auto()  # a call has failed, see `errors`


class _Event(enum.Enum):
    ASKED = enum.auto()  # the lock call begins
    ARRIVED = enum.auto()  # the order is carried out


class _Order(Struct, frozen=True):
    """One order to a rank's thread: unlock, leave the rank free until ``cut`` or for ``free_s``, lock."""

    attempt: int
    unlock: bool
    lock: bool
    free_s: float = 0.0
    limit_s: float = 0.0
    cut: threading.Event = field(default_factory=threading.Event)


class _News(Struct, frozen=True):
    rank: _Rank
    event: _Event
    rung: _Rung
    time: float
    error: Exception | None = None


class _Rank:
    """One process, as the deciding thread sees it."""

    def __init__(self, holdable: Holdable, rung: _Rung) -> None:
        self.holdable = holdable
        self.pid = holdable.pid
        self.orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self.rung = rung
        self.is_busy = False  # an order is in progress
        self.is_asked = False  # and its lock call has begun
        self.limit_s = FIRST_CALL_LIMIT_S
        self.attempt = 0  # the last in which it was released
        self.was_locked = rung is _Rung.LOCKED
        self.stays_locked = False  # it was locked, and its unlock fails

    @property
    def is_locked(self) -> bool:
        return not self.is_busy and self.rung is _Rung.LOCKED

    @property
    def is_pending(self) -> bool:
        return self.is_busy and self.is_asked


class LeaderHold:
    """Locks all of these ranks, once. ``end``: the time.monotonic() value by which to succeed.

    They run, except those of ``locked`` (pids), which are locked already and may also be released for a moment. One of
    these that cannot be unlocked stays as it is, and the others are locked without it. ``check`` is called often while
    this waits, and may raise to end it. ``others`` are held elsewhere. ``stuck_after_s``: how long to wait for a hold
    after its own timeout. ``stuck`` has the pids of those that did not return even then.
    """

    def __init__(
        self,
        ranks: Sequence[Holdable],
        *,
        end: float,
        stuck_after_s: float,
        locked: Collection[int] = (),
        check: Callable[[], None] = lambda: None,
        others: Others | None = None,
        chance: random.Random | None = None,
    ) -> None:
        self.stuck: list[int] = []
        self._ranks = [_Rank(each, _Rung.LOCKED if each.pid in locked else _Rung.RUNNING) for each in ranks]
        self._end = end
        self._stuck_after_s = stuck_after_s
        self._check = check
        self._others = others
        self._chance = chance or random.Random()  # noqa: S311 - not for secrets
        self._attempt = 0
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._last_change = self._begin = time.monotonic()
        self._errors: dict[int, Exception] = {}
        self._giving_up = False
        self._cut = threading.Event()
        self._least_patience_s = self._patience_s = FIRST_PATIENCE_S + PATIENCE_PER_PROCESS_S * len(ranks)
        self._base_hold_s = self._hold_s = FIRST_HOLD_S
        self._passes = 0
        self._fewest_released = RELEASED_PER_PROCESSOR * len(os.sched_getaffinity(0))
        self._most_released = len(ranks)
        self._too_far = 0
        self._ahead: list[_Rank] = []  # their locks were pending at the last release

    def lock(self) -> GangLock:
        """RUNNING → LOCKED for all of them, or an error and all RUNNING (but those that cannot be unlocked).

        Raises LocksFailed, and what ``check`` raises, after everything that was locked is unlocked again and every
        pending call has ended. (A call that does not end is in ``stuck``.)
        """
        if self._others is not None:
            self._others.begin(self._check)
            self._end = min(self._end, self._others.end)
        for rank in self._ranks:
            threading.Thread(target=self._serve, args=(rank,), name=f"lock-{rank.pid}", daemon=True).start()
        try:
            with urgent():
                self._lock_all()
        except BaseException:
            self._bring_back()
            raise
        finally:
            for rank in self._ranks:
                rank.orders.put(None)
        return GangLock(len(self._ranks), self._attempt, time.monotonic() - self._begin)

    # --- the deciding thread ---------------------------------------------------------------------------------

    def _lock_all(self) -> None:
        released = [rank for rank in self._ranks if rank.rung is _Rung.RUNNING]
        self._release_and_lock(released, 0.0)
        while not self._wait():
            self._adapt(released, self._ahead)
            if self._passes == PASSES_BEFORE_A_NEW_START:
                self._passes = 0
                self._base_hold_s = self._hold_s = FIRST_HOLD_S
                self._let_all_run(time.monotonic() + NEW_START_LIMIT_S, self._check)
            released = self._next_in_turn()
            self._ahead = [rank for rank in self._ranks if rank.is_busy]
            hold_s = min(self._hold_s, (self._end - time.monotonic()) / 4)
            # Randomly a bit longer or shorter: otherwise ranks in lockstep could pass each other forever.
            self._release_and_lock(released, max(hold_s, 0.0) * self._chance.uniform(0.5, 1.5))

    def _next_in_turn(self) -> list[_Rank]:
        """Locked ones that are released next: of too many, those whose last release was longest ago."""
        locked = [rank for rank in self._ranks if not rank.is_busy and not rank.stays_locked]
        return sorted(locked, key=lambda rank: rank.attempt)[: self._most_released]

    def _release_and_lock(self, ranks: Sequence[_Rank], free_s: float) -> None:
        self._attempt += 1
        self._cut = threading.Event()
        for rank in ranks:
            rank.attempt = self._attempt
            unlock = rank.rung is _Rung.LOCKED
            self._give(rank, _Order(self._attempt, unlock, True, free_s, rank.limit_s, self._cut))

    def _adapt(self, released: Sequence[_Rank], ahead: Sequence[_Rank]) -> None:
        """The length of the next release, from the result of this one.

        If all that were ahead are locked and a released one is pending, it has passed them: shorter. If nothing has
        moved: longer, because what they have to submit may be far off. The first rank ahead that gets locked ends a
        release early, so a long one does little harm. A few of many ranks are released as long as it takes.
        """
        are_locked = [rank.is_locked for rank in ahead]
        came_up = sum(rank.is_pending for rank in released)
        if (ahead or self._others is not None) and all(are_locked) and came_up:
            self._base_hold_s /= 2
            self._passes += 1
        if any(are_locked) and came_up and len(self._ranks) > self._fewest_released:
            self._release_fewer(len(released))
        if not any(are_locked) and not came_up:
            self._hold_s = max(2 * self._hold_s, LEAST_GROWING_HOLD_S)
        elif self._most_released == len(self._ranks):
            self._hold_s = self._base_hold_s
        elif came_up == len(released):
            self._hold_s /= 2
        self._patience_s = max(self._patience_s * PATIENCE_WEARS_OFF, self._least_patience_s)

    def _release_fewer(self, released: int) -> None:
        """Ranks that were locked with the least are pending, although it has risen: they have submitted more than that.

        With many ranks some always do, so that they never meet. A few that are released at once are stopped in time.
        """
        self._too_far += 1
        if self._too_far == TOO_FAR_BEFORE_A_NEW_START:
            self._too_far, self._passes, self._most_released = 0, PASSES_BEFORE_A_NEW_START, len(self._ranks)
        else:
            self._most_released = max(self._fewest_released, min(self._most_released, released) // 2)
        self._least_patience_s = FIRST_PATIENCE_S + PATIENCE_PER_PROCESS_S * self._most_released

    def _wait(self) -> bool:
        """Wait until all are locked (True), or until it is time for the next release."""
        while True:
            self._check()
            if self._errors:
                raise LocksFailed(self._errors)
            now = time.monotonic()
            if all(rank.is_locked for rank in self._ranks):
                held = self._others.are_held() if self._others is not None else True
                if held is not False:
                    return held is True
                if self._others is not None and now < self._end:
                    self._others.wait()
                    continue
            if self._others is not None:
                self._others.came_late()
            if now >= self._end:
                raise self._out_of_time()
            wait_s = self._quiet_left_s(now)
            if wait_s <= 0:
                return False
            self._take_news(min(wait_s, self._end - now, _LOOK_EVERY_S))

    def _quiet_left_s(self, now: float) -> float:
        """How long to wait without a change before the locked ones are released."""
        if any(rank.is_busy and not rank.is_asked for rank in self._ranks):
            return math.inf  # in progress
        if any(not rank.is_busy and rank.rung is _Rung.RUNNING for rank in self._ranks):
            return 0.0  # its call has timed out, and it runs: lock again at once
        if any(rank.is_locked and not rank.stays_locked for rank in self._ranks):
            return self._last_change + self._patience_s - now
        return math.inf  # all have work pending, and nobody could be released

    def _take_news(self, timeout_s: float) -> None:
        """Wait for a message, and handle all that have arrived."""
        with contextlib.suppress(queue.Empty):
            self._take(self._news.get(timeout=timeout_s))
            while True:
                self._take(self._news.get_nowait())

    def _take(self, news: _News) -> None:
        rank = news.rank
        if news.event is _Event.ASKED:
            rank.is_asked = True
        else:
            rank.is_busy, rank.rung = False, news.rung
            if news.error is not None:
                self._errors.setdefault(rank.pid, news.error)
            if rank.is_locked:
                self._learn_patience(news.time)
            elif rank.is_asked:
                rank.limit_s *= 2
        self._last_change = max(self._last_change, news.time)

    def _learn_patience(self, locked_at: float) -> None:
        """A rank that was locked long after the last change was busy, not ahead: wait for such work."""
        quiet_s = locked_at - self._last_change
        on_their_way = any(rank.is_busy and not rank.is_asked for rank in self._ranks)
        if not on_their_way:
            self._patience_s = max(self._patience_s, min(2 * quiet_s, (self._end - locked_at) / 4))

    def _out_of_time(self) -> Exception:
        # Those released last could be locked, and may be running again now.
        not_locked = [rank for rank in self._ranks if not rank.is_locked]
        if not not_locked and self._others is not None:
            return self._others.too_late()
        ahead = [rank for rank in not_locked if rank in self._ahead] or not_locked
        pending = [rank.pid for rank in ahead]
        locked = len(self._ranks) - len(pending)
        names = ", ".join(map(str, pending))
        error = LockTimeout(
            f"only {locked} of {len(self._ranks)} CUDA processes could be locked in "
            f"{self._end - self._begin:.3g} s and {self._attempt} attempts: "
            f"process {names} still {ahead[0].holdable.pending}",
            pid=pending[0],
            action="lock",
            result=NOT_READY,
            state="running",
            hint="the job runs as before; check that all of its processes make progress, or allow more time",
        )
        return LocksFailed({pending[0]: error})

    def _bring_back(self) -> None:
        """Make all RUNNING again. Pending calls cannot be cancelled: the others run, so that the calls end."""
        self._giving_up = True
        self._cut.set()
        now = time.monotonic()
        pending_s = min(max(rank.limit_s for rank in self._ranks), max(self._end - now, 0.0))
        self._let_all_run(now + pending_s + self._stuck_after_s, lambda: None)
        self.stuck = [rank.pid for rank in self._ranks if rank.is_busy]

    def _let_all_run(self, until: float, check: Callable[[], None]) -> None:
        """Unlock what is locked or gets locked, until no call is pending or the time ``until``."""
        while time.monotonic() < until:
            check()
            for rank in self._ranks:
                if rank.is_locked and not rank.stays_locked:
                    self._give(rank, _Order(self._attempt, unlock=True, lock=False))
            if not any(rank.is_busy for rank in self._ranks):
                return
            self._take_news(_LOOK_EVERY_S)

    def _give(self, rank: _Rank, order: _Order) -> None:
        rank.is_busy, rank.is_asked = True, False
        rank.orders.put(order)

    # --- a rank's own thread ---------------------------------------------------------------------------------

    def _serve(self, rank: _Rank) -> None:
        with urgent():
            self._serve_urgently(rank)

    def _serve_urgently(self, rank: _Rank) -> None:
        while (order := rank.orders.get()) is not None:
            rung, failure = _Rung.UNKNOWN, None
            try:
                rung = self._carry_out(rank, order)
            except Exception as error:  # noqa: BLE001 - passed to the deciding thread, which raises it
                failure = error
            self._news.put(_News(rank, _Event.ARRIVED, rung, time.monotonic(), failure))

    def _carry_out(self, rank: _Rank, order: _Order) -> _Rung:
        if order.unlock:
            try:
                rank.holdable.release()
            except GpucrError:
                if not rank.was_locked or not rank.holdable.is_held:
                    raise
                rank.stays_locked = True
                return _Rung.LOCKED
        if not order.lock:
            return _Rung.RUNNING
        order.cut.wait(order.free_s)
        left_s = self._end - time.monotonic()
        if self._giving_up or left_s <= 0:
            return _Rung.RUNNING
        self._news.put(_News(rank, _Event.ASKED, _Rung.RUNNING, time.monotonic()))
        rung = _Rung.LOCKED if rank.holdable.hold(min(left_s, order.limit_s)) else _Rung.RUNNING
        if order.attempt < self._attempt:
            # It was ahead: the free ones have caught up with it, or it is no longer held.
            self._cut.set()
        return rung
