"""Who may be on the GPUs: pure functions of jobs, GPUs and a moment. No clock, no processes.

Every job that sleeps until it is asked decides for itself, from the same picture, under a lock of the GPUs it needs.
Those that it asks to make room check the same rules again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from gpucr.records import Count, Duration, Priority, Record, Text

QUIET_S = 1.0
"""A job without an open request is idle once it had no byte for this long. Shorter pauses are between two requests."""

Bytes = Mapping[str, int]
"""Device memory by the UUIDs of GPUs."""

Phase = Literal["asleep", "waiting", "waking", "serving", "draining", "falling-asleep", "unstarted", "gone"]
"""``waiting``: in line for its GPUs. ``draining``: new requests are held back until the open ones are answered.
``unstarted``: it starts when it is asked. ``gone``: it has ended, or is a borrower's to bring back."""

OTHERS = "memory that other programs use"
"""What a job waits for that no other job of this kind can give."""

ON_GPU: frozenset[Phase] = frozenset({"serving", "draining", "falling-asleep", "waking"})


class Contender(Record, frozen=True):
    """One job that is served on demand, as others see it. Moments are of the machine's monotonic clock.

    ``needs``: its device memory when it is on its GPUs; None: not known, because it has never run: it then gets all
    GPUs that it ``may_use`` without another of these jobs. ``used_s``: when a byte came or went last; ``since_s``:
    since when it is on its GPUs; ``waits_since_s``: since when a request waits. ``is_movable``: it sleeps
    in host memory, and can go to a store.
    """

    name: Text
    uid: Count
    phase: Phase
    priority: Priority
    needs: Mapping[Text, Count] | None
    stay_s: Duration
    may_use: tuple[Text, ...] = ()
    open_requests: Count = 0
    used_s: Duration = 0.0
    since_s: Duration = 0.0
    waits_since_s: Duration | None = None
    is_movable: bool = False


class Wake(Struct, frozen=True):
    """It may be woken once these have been put to sleep, in this order."""

    victims: tuple[str, ...] = ()


class Wait(Struct, frozen=True):
    """It has to wait, for the jobs or the memory named. ``drain``: these are to finish their requests and make room."""

    for_what: tuple[str, ...]
    drain: tuple[str, ...] = ()


class Never(Struct, frozen=True):
    """It needs more memory than a GPU has: of ``gpu``, so much, of so much."""

    gpu: str
    needed_bytes: int
    total_bytes: int


Decision = Wake | Wait | Never


def never(needs: Bytes | None, total: Bytes) -> Never | None:
    """Whether memory like that is on no GPU here, or not on the one that the job was on."""
    for uuid, size_bytes in sorted((needs or {}).items()):
        if size_bytes > total.get(uuid, 0):
            return Never(uuid, size_bytes, total.get(uuid, 0))
    return None


def decide(me: Contender, others: Sequence[Contender], total: Bytes, free: Bytes, now_s: float) -> Decision:
    """What the job that wants to wake does next. ``free``: what NVML says is free now, for jobs of all kinds."""
    impossible = never(me.needs, total)
    if impossible is not None:
        return impossible
    on_gpu = [each for each in others if each.phase in ON_GPU and _share(each, me)]
    ahead = [each for each in others if each.phase == "waiting" and _share(each, me) and _is_before(each, me)]
    if ahead and not _both_fit(me, ahead, on_gpu, free):
        return Wait(tuple(each.name for each in ahead))
    starting = tuple(each.name for each in on_gpu if each.phase == "waking")
    if starting:  # what is free now is not yet taken by them
        return Wait(starting)
    missing = _missing(me, free)
    ready, later = _that_make_room(me, on_gpu, now_s)
    victims = _enough(me, ready, on_gpu, missing)
    if victims is not None:
        return Wake(victims)
    asked = _enough(me, [*ready, *later], on_gpu, missing)
    if asked is None:
        return Wait(tuple(each.name for each in on_gpu) or (OTHERS,))
    names = {each.name for each in later}
    return Wait(asked, drain=tuple(name for name in asked if name in names))


Place = Mapping[str, str]
"""Where a job wakes: for each GPU that it was on, the one that it goes to."""


def places(me: Contender, models: Mapping[str, str], allowed: Collection[str], free: Bytes) -> Iterator[Place]:
    """Where a job could wake: on its own GPUs, then on ``allowed`` ones of their model, the emptiest first.

    ``models`` by UUID. A job on several GPUs goes to several, its largest part to the emptiest one.
    """
    needs = me.needs or {}
    yield {uuid: uuid for uuid in needs}
    if len({models.get(uuid) for uuid in needs}) != 1 or models.get(next(iter(needs))) is None:
        return  # of several models, or lost: the driver does not take it elsewhere
    model = models[next(iter(needs))]
    fitting = [uuid for uuid, name in models.items() if name == model and (uuid in needs or uuid in allowed)]
    fitting.sort(key=lambda uuid: (-free.get(uuid, 0), uuid))
    largest_first = sorted(needs, key=lambda uuid: (-needs[uuid], uuid))
    for first in range(len(fitting) - len(needs) + 1):
        chosen = fitting[first : first + len(needs)]
        if set(chosen) != set(needs):
            yield dict(zip(largest_first, chosen, strict=True))


def at(me: Contender, place: Place) -> Contender:
    """The job, as one that was there."""
    return me if me.needs is None else replace(me, needs={place[uuid]: size for uuid, size in me.needs.items()})


def choose(
    me: Contender, where: Sequence[Place], others: Sequence[Contender], total: Bytes, free: Bytes, now_s: float
) -> tuple[Place, Decision]:
    """Where it wakes: at the first place with room, else at the first where others make room now, else the first."""
    found = [(place, decide(at(me, place), others, total, free, now_s)) for place in where]
    with_room = (each for each in found if each[1] == Wake())
    after_others = (each for each in found if isinstance(each[1], Wake))
    return next(with_room, None) or next(after_others, None) or found[0]


Answer = Literal["now", "drain", "no"]


def makes_room(job: Contender, wanted_by: Contender, now_s: float) -> Answer:
    """Whether a job on its GPUs makes room for this one: at once, when its open requests are answered, or not yet.

    An idle job does at once. One that is asked stays for its time: then those of a higher priority get its place at
    once, and those of the same one when the open requests are answered. For another user's job the priorities are the
    same, unless that user is root.
    """
    if job.phase not in ("serving", "draining"):
        return "no"
    if is_idle(job, now_s):
        return "now"
    if now_s - job.since_s < job.stay_s:
        return "no"
    theirs = wanted_by.priority if wanted_by.uid in (job.uid, 0) else min(wanted_by.priority, job.priority)
    if theirs > job.priority:
        return "now"
    if theirs < job.priority:
        return "no"
    return "drain" if job.open_requests else "now"


def next_to_store(others: Iterable[Contender], uid: int) -> Contender | None:
    """Who goes from host memory to its store when that is short: of this user's, the least recently used."""
    return min((each for each in others if each.is_movable and each.uid == uid), key=_last, default=None)


def is_idle(job: Contender, now_s: float) -> bool:
    """Whether nobody asks it: no request is open, and the last byte was long enough ago."""
    return not job.open_requests and now_s - job.used_s >= QUIET_S


def _that_make_room(
    me: Contender, on_gpu: Sequence[Contender], now_s: float
) -> tuple[list[Contender], list[Contender]]:
    """Those that make room at once, idle ones first, then the least recently used of the lowest priority; and later."""
    answers = [(each, makes_room(each, me, now_s)) for each in on_gpu]
    ready = [each for each, answer in answers if answer == "now"]
    ready.sort(key=lambda each: (not is_idle(each, now_s), 0 if is_idle(each, now_s) else each.priority, *_last(each)))
    return ready, sorted((each for each, answer in answers if answer == "drain"), key=_last)


def _last(each: Contender) -> tuple[float, str]:
    return each.used_s, each.name


def _missing(me: Contender, free: Bytes) -> dict[str, int]:
    return {
        uuid: size_bytes - free.get(uuid, 0)
        for uuid, size_bytes in (me.needs or {}).items()
        if size_bytes > free.get(uuid, 0)
    }


def _enough(
    me: Contender, ready: Sequence[Contender], on_gpu: Sequence[Contender], missing: Bytes
) -> tuple[str, ...] | None:
    """The first of these whose memory is enough, without those that turn out not to be needed; None: all are not."""
    if me.needs is None:
        return tuple(each.name for each in ready) if len(ready) == len(on_gpu) else None
    left = dict(missing)
    chosen: list[Contender] = []
    for each in ready:
        gives = {uuid: each.needs[uuid] for uuid in left if each.needs and each.needs.get(uuid)}
        if gives and any(left[uuid] > 0 for uuid in gives):
            chosen.append(each)
            left = {uuid: size - gives.get(uuid, 0) for uuid, size in left.items()}
    if any(size > 0 for size in left.values()):
        return None
    for each in tuple(reversed(chosen)):
        without = {uuid: size + (each.needs or {}).get(uuid, 0) for uuid, size in left.items()}
        if all(size <= 0 for size in without.values()):
            chosen.remove(each)
            left = without
    return tuple(each.name for each in chosen)


def _both_fit(me: Contender, ahead: Sequence[Contender], on_gpu: Sequence[Contender], free: Bytes) -> bool:
    """Whether it can overtake those ahead without taking what they wait for: there is room for all of them."""
    if me.needs is None or any(each.needs is None for each in ahead):
        return False
    for uuid, size_bytes in me.needs.items():
        room = free.get(uuid, 0) + _sum(on_gpu, uuid) - _sum(ahead, uuid)
        if size_bytes > room:
            return False
    return not _missing(me, free)


def _sum(jobs: Iterable[Contender], uuid: str) -> int:
    return sum((each.needs or {}).get(uuid, 0) for each in jobs)


def gpus_of(job: Contender) -> tuple[str, ...]:
    """The GPUs that it needs, or may need."""
    return job.may_use if job.needs is None else tuple(sorted(job.needs))


def _share(one: Contender, other: Contender) -> bool:
    return not set(gpus_of(one)).isdisjoint(gpus_of(other))


def _is_before(other: Contender, me: Contender) -> bool:
    """In line: the higher priority first, where it counts, then who waits for longer."""
    higher, lower = (other, me) if other.priority > me.priority else (me, other)
    if higher.priority > lower.priority and higher.uid in (lower.uid, 0):
        return higher is other
    return (other.waits_since_s or 0.0, other.name) < (me.waits_since_s or 0.0, me.name)
