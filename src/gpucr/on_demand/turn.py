"""A job's way to its GPUs: it waits in line, has others make room, and is woken. Blocking, in a thread of its own.

Who changes which jobs are on a GPU holds its locks meanwhile: that of borrowed GPUs, which is the user's, and a claim
that counts for all users.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from msgspec import Struct

from gpucr import Cancellation
from gpucr.borrow import ledger
from gpucr.driver.gpus import list_gpus, nvml_kept_open
from gpucr.errors import Busy, GpucrError, GpuFull, Unsupported, reason_of
from gpucr.linux import claims
from gpucr.on_demand import policy
from gpucr.on_demand.job import Seen, ServedJob
from gpucr.on_demand.neighbours import Message, Neighbour, ask, neighbours
from gpucr.on_demand.policy import Bytes, Contender, Never, Phase, Wait
from gpucr.operations.chosen import lent_jobs
from gpucr.quantities import format_bytes
from gpucr.records import to_json

POLL_S = 0.05
ANSWER_LIMIT_S = 600.0
"""How long another forwarder may take to put its job to sleep, or into its store."""


_ELSEWHERE = {"lent": ("a borrower",), "gone": ("its supervisor",)}
"""Who brings back a job that is not here."""


class GaveUp(Exception):
    """No request waits any more, or the forwarder is to end."""


class Woken(Struct, frozen=True):
    """The job is awake. ``found``: where it was; ``evicted``: who made room; ``seconds``: of the wake alone;
    ``moved``: the GPUs that it went to, if they are others than it was on.
    """

    found: str
    evicted: tuple[str, ...]
    seconds: float
    moved: tuple[str, ...] = ()


class Turn:
    """One wait in line. ``me`` is asked for the job as others see it; ``check`` raises GaveUp."""

    def __init__(
        self,
        job: ServedJob,
        me: Callable[[], Contender],
        check: Callable[[], None],
        cancel: Cancellation,
        on_wait: Callable[[Sequence[str]], None],
        on_phase: Callable[[Phase, Bytes | None], None],
    ) -> None:
        self._job, self._me, self._check, self._cancel = job, me, check, cancel
        self._on_wait, self._on_phase = on_wait, on_phase
        self._may_move = True
        self._silent: set[str] = set()
        self._told: tuple[str, ...] = ()

    def take(self) -> Woken:
        """Wait for the turn, then wake the job. Raises GaveUp, and as `ServedJob.wake`; then it sleeps as before.

        Unsupported with GPUCR-ON-DEMAND-TOO-LARGE at once if it can never fit.
        """
        while True:
            self._check()
            seen = self._job.look()
            if seen.where == "awake":
                self._job.note(asleep=False)
                return Woken("awake", (), 0.0)
            if seen.where == "gone" and not self._job.comes_back():
                raise Unsupported(f"the job {self._job.name} cannot be woken: {seen.why}", hint="start it again")
            waits_for = _ELSEWHERE.get(seen.where) or self._try(seen)
            if isinstance(waits_for, Woken):
                return waits_for
            if waits_for and waits_for != self._told:
                self._told = waits_for
                self._on_wait(waits_for)
            time.sleep(POLL_S * random.uniform(0.5, 1.0))  # noqa: S311 - so that two do not always meet

    def _try(self, seen: Seen) -> Woken | tuple[str, ...]:
        """Wake it if it is its turn; otherwise say what it waits for (nothing: another one decides right now)."""
        me = self._me()
        with nvml_kept_open():
            allowed = self._job.wake_on() if self._may_move and seen.where != "unstarted" else ()
            with _gpus_held({*policy.gpus_of(me), *allowed}, self._check) as is_ours:
                return self._with_gpus(seen, me, allowed) if is_ours else ()

    def _with_gpus(self, seen: Seen, me: Contender, allowed: Collection[str]) -> Woken | tuple[str, ...]:
        here = list_gpus()
        total = {gpu.uuid: gpu.memory_total_bytes for gpu in here}
        free = {gpu.uuid: gpu.memory_free_bytes for gpu in here}
        models = {gpu.uuid: gpu.name for gpu in here if not gpu.mig_enabled}
        where, others_first = [], tuple[str, ...]()
        for place in policy.places(me, models, allowed, free):
            borrowers = _borrowers(place.values() or policy.gpus_of(me), self._job.name)
            others_first = others_first or borrowers
            if not borrowers:
                where.append(place)
        if not where:
            return others_first
        around = list(neighbours(self._silent))
        place, decided = policy.choose(me, where, [each.job for each in around], total, free, time.monotonic())
        if isinstance(decided, Never):
            raise too_large(self._job.name, decided)
        there = policy.at(me, place)
        if isinstance(decided, Wait):
            for each in _named(decided.drain, around):
                _ask(each, "drain", there)
            return decided.for_what
        for each in _named(decided.victims, around):
            self._check()
            if not _ask(each, "sleep", there):
                return (each.job.name,)
        return self._wake(seen, me, place, decided.victims)

    def _wake(
        self, seen: Seen, me: Contender, place: policy.Place, evicted: tuple[str, ...]
    ) -> Woken | tuple[str, ...]:
        self._on_phase("waking", policy.at(me, place).needs)
        begun_s = time.monotonic()
        try:
            self._job.wake(seen, place, self._cancel)
        except GpucrError as e:
            self._on_phase("waiting", me.needs)  # others need not wait for it to take its memory
            if e.code == GpuFull.code or isinstance(e, Busy):  # another program was faster, or works on it
                return (policy.OTHERS,)
            if isinstance(e, Unsupported) and any(old != new for old, new in place.items()):
                self._may_move = False  # the driver cannot take it there: its own GPUs are left
                self._job.journal.tell("move-failed", why=reason_of(e), code=e.code)
                return (policy.OTHERS,)
            raise
        moved = tuple(place.values()) if any(old != new for old, new in place.items()) else ()
        return Woken(seen.where, evicted, time.monotonic() - begun_s, moved)


def too_large(name: str, found: Never) -> Unsupported:
    """The error of a job that can never be woken here."""
    if not found.total_bytes:
        why = f"the GPU {found.gpu} is not here any more"
        hint = f"repair it, or restore the job on a machine with as many: `gpucr dump {name} --to DIR`"
    else:
        needed, total = format_bytes(found.needed_bytes), format_bytes(found.total_bytes)
        why = f"it needs {needed} of {found.gpu}, which has {total}"
        hint = f"`gpucr resume {name} --gpu auto` brings it to another GPU"
    return Unsupported(f"the job {name} cannot be woken: {why}", hint=hint, code="GPUCR-ON-DEMAND-TOO-LARGE")


def sleep_with_room(job: ServedJob, cancel: Cancellation) -> None:
    """Put the job to sleep. If host memory is short, others that sleep there go to their stores, as many as needed.

    Raises as `ServedJob.sleep`: also if nobody can go.
    """
    silent: set[str] = set()
    while True:
        try:
            job.sleep(cancel)
            return
        except Unsupported as e:
            if e.code != "GPUCR-HOST-MEMORY":
                raise
            around = {each.job.name: each for each in neighbours(silent)}
            chosen = policy.next_to_store((each.job for each in around.values()), os.geteuid())
            if chosen is None:
                raise
            address = around[chosen.name].address
            if not _asked(address, {"ask": "store"}):
                silent.add(address)  # it cannot, or another one has just asked it


def _borrowers(gpus: Collection[str], name: str) -> tuple[str, ...]:
    """Borrowers that have one of these GPUs, and jobs that made room for one and come back first."""
    having = [each.name for each in ledger.borrowings() if each.is_active and not set(gpus).isdisjoint(each.gpus)]
    back = [
        other
        for other, listed in lent_jobs().items()
        if other != name
        and listed.record is not None
        and listed.record.lent is not None
        and not set(gpus).isdisjoint(listed.record.lent.gpus)
    ]
    return (*having, *back)


@contextlib.contextmanager
def _gpus_held(gpus: Collection[str], check: Callable[[], None]) -> Iterator[bool]:
    with ledger.gpus_held(gpus, check), claims.claimed_gpus(gpus) as is_ours:
        yield is_ours


def _named(names: Collection[str], around: Sequence[Neighbour]) -> list[Neighbour]:
    """In the order of the names."""
    by_name = {each.job.name: each for each in around}
    return [by_name[name] for name in names]


def _ask(other: Neighbour, what: str, me: Contender) -> bool:
    return _asked(other.address, {"ask": what, "for": to_json(me)})


def _asked(address: str, message: Message) -> bool:
    """Whether the other has done it. One that is killed meanwhile has not."""
    try:
        answer, _ = ask(address, message, ANSWER_LIMIT_S)
    except (OSError, ValueError):
        return False
    return answer.get("answer") == "done"
