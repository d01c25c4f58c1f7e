"""Dumps, prunes and removals at once, in every order that hypothesis finds: no committed snapshot ever lacks a piece.

Every actor runs the real code in a thread of its own and stands still before each operation on the store, until the
test lets it do that one. Operations can fail, happen twice, or happen later than their answer; actors can die.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpucr.errors import GpucrError
from gpucr.store import snapshots
from gpucr.store.opened import Store
from gpucr.store.prune import prune
from gpucr.store.retention import PruneRules
from tests.store.dumps import PIECE_BYTES, content, dump, new_store, restore
from tests.store.memory import FaultyBackend, Killed, MemoryBackend
from tests.storm import IS_STORM, sample

pytestmark = pytest.mark.in_turn

_DEADLINE_S = 30.0
_MOST_ACTORS = 4


class Gate:
    """Lets the threads of one actor do one operation at a time, when `allow` is called."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed: list[str | None] = []
        self._waiting = 0
        self._done = 0
        self.is_dead = False
        self.has_ended = False

    def fault(self, operation: str, name: str) -> str | None:
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._allowed or self.is_dead)
            self._waiting -= 1
            return "kill" if self.is_dead else self._allowed.pop(0)

    def finished(self, work: Callable[[], object]) -> object:
        try:
            return work()
        finally:
            with self._changed:
                self._done += 1
                self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()

    def is_ready(self) -> bool:
        """Wait until the actor stands before an operation, or has ended. Whether it stands."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiting or self.has_ended, _DEADLINE_S), "an actor hangs"
            return not self.has_ended

    def allow(self, kind: str | None) -> None:
        with self._changed:
            before = self._done
            self._allowed.append(kind)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._done > before or self.has_ended, _DEADLINE_S), "it hangs"

    def kill(self) -> None:
        with self._changed:
            self.is_dead = True
            self._changed.notify_all()


class GatedBackend(FaultyBackend):
    """Tells the gate when an operation has been done."""

    gate: Gate

    def _do(self, operation: str, name: str, work: Callable[[], object]) -> object:
        return self.gate.finished(lambda: super(GatedBackend, self)._do(operation, name, work))


class Actor:
    def __init__(self, inner: MemoryBackend, work: Callable[[Store], object]) -> None:
        self.gate = Gate()
        self.backend = GatedBackend(inner, self.gate.fault)
        self.backend.gate = self.gate
        store = Store(self.backend, Store.open(inner).config, None, Store.open(inner).digest)
        self.outcome: object = None
        self._thread = threading.Thread(target=self._run, args=(work, store), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Store], object], store: Store) -> None:
        try:
            with contextlib.suppress(Killed):
                self.outcome = work(store)
        except (GpucrError, OSError) as e:
            self.outcome = e
        except BaseException as e:
            self.outcome = e
            raise
        finally:
            self.gate.end()

    def end(self) -> None:
        self.gate.kill()
        self._thread.join(_DEADLINE_S)
        assert not self._thread.is_alive()


_TO_THE_END = 1000
_numbers = st.lists(st.integers(1, 2), min_size=1, max_size=2, unique=True)
_which = st.integers(0, _MOST_ACTORS - 1)
_counts = st.one_of(st.just(_TO_THE_END), st.integers(0, 25))
_rules = st.builds(
    PruneRules,
    keep_last=st.sampled_from([0, 0, 0, 1, None]),
    grace_s=st.just(-1e9),
    # Sometimes everyone else is dead, also those who are not.
    dead_after_s=st.sampled_from([1e9, 1e9, 1e9, -1e9]),
    repack_below=st.sampled_from([0.0, 0.0, 1.0]),
)


def _name(numbers: Sequence[int]) -> str:
    return "-".join(["n", *map(str, numbers)])


class StoreUnderTest(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.inner = MemoryBackend()
        # One piece a pack, so that pruning has much to decide.
        self.store = new_store(self.inner, pack_bytes=PIECE_BYTES)
        self.actors: list[Actor] = []
        self.ended: list[Actor] = []

    @rule(numbers=_numbers, count=_counts)
    def begin_a_dump(self, numbers: Sequence[int], count: int) -> None:
        self._start(lambda store: dump(store, {"a": content(*numbers)}, _name(numbers)), count)

    @rule(rules=_rules, count=_counts)
    def begin_a_prune(self, rules: PruneRules, count: int) -> None:
        self._start(lambda store: prune(store, rules), count)

    @rule(which=_which, count=_counts)
    def go_on(self, which: int, count: int) -> None:
        if self.actors:
            self._go_on(self.actors[which % len(self.actors)], count)

    @rule(which=_which, kind=st.sampled_from(["before", "after", "late", "twice", "kill", "deliver", "remove"]))
    def make_trouble(self, which: int, kind: str) -> None:
        if kind == "deliver":
            for actor in (*self.actors, *self.ended):
                actor.backend.deliver()
        elif kind == "remove":
            for snapshot in snapshots.list_all(self.store).snapshots[:1]:
                snapshots.remove(self.store, snapshot.id)
        elif self.actors:
            self._go_on(self.actors[which % len(self.actors)], 1, kind)

    def _start(self, work: Callable[[Store], object], count: int) -> None:
        if len(self.actors) < _MOST_ACTORS:
            actor = Actor(self.inner, work)
            self.actors.append(actor)
            self._go_on(actor, count)

    def _go_on(self, actor: Actor, count: int, kind: str | None = None) -> None:
        for _ in range(count):
            if not actor.gate.is_ready():
                break
            actor.gate.allow(kind)
        if not actor.gate.is_ready():
            actor.end()
            self.actors.remove(actor)
            self.ended.append(actor)

    @invariant()
    def every_committed_snapshot_is_whole(self) -> None:
        for snapshot in snapshots.list_all(self.store).intact():
            numbers = [int(text) for text in (snapshot.name or "").split("-")[1:]]
            assert restore(self.store, snapshot) == {"a": content(*numbers)}

    def teardown(self) -> None:
        for actor in self.actors:
            actor.end()


_KEEP_NONE = PruneRules(keep_last=0, grace_s=-1e9)
_ALL_ARE_DEAD = PruneRules(keep_last=0, grace_s=-1e9, dead_after_s=-1e9)
_REPACK = PruneRules(keep_last=1, grace_s=-1e9, repack_below=1.0)


class _World:
    """One store, with one snapshot to begin with, and what is done with it in one order."""

    def __init__(self) -> None:
        self.inner = MemoryBackend()
        self.store = new_store(self.inner, pack_bytes=2 * PIECE_BYTES)
        self.actors: list[Actor] = []
        self.dump_now()

    def dump_now(self) -> None:
        dump(self.store, {"a": content(1, 2, 3)})

    def begin(self, work: Callable[[Store], object], count: int) -> Actor:
        """An actor that has done so many operations."""
        actor = Actor(self.inner, work)
        self.actors.append(actor)
        self.go_on(actor, count)
        return actor

    def go_on(self, actor: Actor, count: int = _TO_THE_END) -> None:
        while count and actor.gate.is_ready():
            actor.gate.allow(None)
            count -= 1
        self.check()

    def prune_twice(self, keep_last: int | None) -> None:
        """Retire, then delete."""
        for _ in range(2):
            prune(self.store, PruneRules(keep_last=keep_last, grace_s=-1e9))
            self.check()

    def check(self) -> None:
        """Everything that exists now is complete."""
        for snapshot in snapshots.list_all(self.store).intact():
            assert restore(self.store, snapshot) == {"a": content(1, 2, 3)}

    def end(self) -> None:
        for actor in self.actors:
            actor.end()


_Work = Callable[[Store], object]


def _dump(store: Store) -> object:
    return dump(store, {"a": content(1, 2, 3)})


def _pruning(rules: PruneRules) -> _Work:
    return lambda store: prune(store, rules)


def _play(
    actors: Sequence[_Work], counts: Sequence[int], *, retires: bool, first_goes_first: bool, dumps: bool
) -> list[bool]:
    """Both stand still after so many operations, others work, then they continue. Whether each stood still at all."""
    world = _World()
    try:
        begun = [world.begin(actors[0], counts[0])]
        if retires:
            prune(world.store, _KEEP_NONE)
        begun.append(world.begin(actors[1], counts[1]))
        stood = [actor.gate.is_ready() for actor in begun]
        world.prune_twice(0)
        if dumps:
            world.dump_now()
        for actor in begun if first_goes_first else reversed(begun):
            world.go_on(actor)
            world.prune_twice(None)
        world.dump_now()
        world.check()
    finally:
        world.end()
    return stood


_RULES = {"keep none": _KEEP_NONE, "all are dead": _ALL_ARE_DEAD, "repack": _REPACK}
_CASES = [
    *(
        (who, rules, dumps)
        for who in ("dump, prune", "prune, dump", "prune, prune")
        for rules in _RULES
        for dumps in (False, True)
    ),
    ("dump, retire, prune", "keep none", False),
]


@pytest.mark.parametrize(("who", "rules", "dumps"), sample(_CASES, 99))
def test_every_order_with_two_pauses(who: str, rules: str, dumps: bool) -> None:
    """Also where hypothesis would need luck: bugs of this kind need few changes from one actor to another.

    A storm tries all of them, and two or three times as many orders of each.
    """
    names = who.split(", ")
    actors = [_dump if name == "dump" else _pruning(_RULES[rules]) for name in (names[0], names[-1])]
    thorough, usual = (1, 3) if "retire" in names else (5, 10) if names[-1] == "dump" else (11, 22)
    stride = thorough if IS_STORM else usual
    first_goes_first = who in ("prune, dump", "dump, retire, prune")
    first_count, stood = 0, True
    while stood:
        second_count, other_stood = first_count % stride, True
        while other_stood:
            counts = (first_count, second_count)
            stood, other_stood = _play(
                actors, counts, retires="retire" in names, first_goes_first=first_goes_first, dumps=dumps
            )
            second_count += stride
        first_count += 1
    assert first_count > 8


StoreUnderTest.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestInterleaving = StoreUnderTest.TestCase
