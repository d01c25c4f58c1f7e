"""Who may be on the GPU: tables, and many random days of a machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpucr.on_demand import policy
from gpucr.on_demand.policy import Contender, Never, Phase, Wait, Wake
from tests.storm import IS_STORM

GPU, OTHER = "GPU-0", "GPU-1"
TOTAL = {GPU: 100, OTHER: 100}
NOW = 1000.0


def job(
    name: str,
    phase: Phase = "serving",
    *,
    needs: dict[str, int] | None = None,
    priority: int = 100,
    uid: int = 1000,
    requests: int = 0,
    used: float = 500.0,
    since: float = 100.0,
    waits: float | None = None,
) -> Contender:
    """A job that needs 40 of the first GPU, has been there for long and unused for long."""
    needs = {GPU: 40} if needs is None else needs
    return Contender(name, uid, phase, priority, needs, 10.0, (), requests, used, since, waits)


ME = job("me", "waiting", waits=990.0)
BUSY: dict[str, Any] = {"requests": 1, "used": NOW}
FRESH: dict[str, Any] = {**BUSY, "since": NOW - 5}


@pytest.mark.parametrize(
    ("others", "free", "decision"),
    [
        pytest.param([], 40, Wake(), id="it fits"),
        pytest.param([], 39, Wait((policy.OTHERS,)), id="strangers have the memory"),
        pytest.param([job("a"), job("b")], 20, Wake(("a",)), id="an idle one, by name if all else is the same"),
        pytest.param([job("a", used=700), job("b")], 20, Wake(("b",)), id="the least recently used one"),
        pytest.param([job("a", **BUSY), job("b", used=700)], 20, Wake(("b",)), id="the idle one"),
        pytest.param([job("a", **BUSY), job("b", **BUSY)], 20, Wait(("a",), drain=("a",)), id="a slice is over"),
        pytest.param([job("a", **FRESH), job("b", **FRESH)], 20, Wait(("a", "b")), id="no slice is over"),
        pytest.param([job("a", used=NOW - 0.5)], 20, Wake(("a",)), id="between two requests, the slice is over"),
        pytest.param([job("a", used=NOW - 0.5, since=NOW - 5)], 20, Wait(("a",)), id="between two requests"),
        pytest.param([job("a", priority=50, **BUSY)], 20, Wake(("a",)), id="a lower priority, with a request"),
        pytest.param([job("a", priority=50, **FRESH)], 20, Wait(("a",)), id="a lower priority that came just now"),
        pytest.param([job("a", priority=200, **BUSY)], 20, Wait(("a",)), id="a higher priority, with a request"),
        pytest.param([job("a", priority=200)], 20, Wake(("a",)), id="a higher priority, idle"),
        pytest.param([job("a", priority=50, uid=1, **BUSY)], 20, Wait(("a",), drain=("a",)), id="another user's"),
        pytest.param([job("a", needs={OTHER: 90})], 20, Wait((policy.OTHERS,)), id="one on another GPU"),
        pytest.param([job("a", needs={GPU: 10}), job("b", used=600)], 20, Wake(("b",)), id="no more than needed"),
        pytest.param([job("a", needs={GPU: 10}), job("b", needs={GPU: 10}, used=600)], 20, Wake(("a", "b")), id="two"),
        pytest.param([job("a", "waking")], 40, Wait(("a",)), id="one that starts has not taken its memory yet"),
        pytest.param([job("a", "asleep")], 20, Wait((policy.OTHERS,)), id="one that sleeps has nothing to give"),
        pytest.param([job("a", "waiting", waits=980.0)], 40, Wait(("a",)), id="one is ahead in line"),
        pytest.param([job("a", "waiting", waits=995.0)], 40, Wake(), id="one is behind in line"),
        pytest.param([job("a", "waiting", waits=980.0)], 80, Wake(), id="there is room for the one ahead, too"),
        pytest.param(
            [job("a", "waiting", waits=980.0), job("b", **BUSY)], 40, Wake(), id="and after others have made room"
        ),
        pytest.param([job("a", "waiting", priority=200, waits=995.0)], 40, Wait(("a",)), id="a higher priority"),
        pytest.param([job("a", "waiting", priority=200, uid=1, waits=995.0)], 40, Wake(), id="but not another user's"),
        pytest.param([job("a", "waiting", priority=200, uid=0, waits=995.0)], 40, Wait(("a",)), id="only root's"),
        pytest.param([job("a", "draining", **BUSY)], 20, Wait(("a",), drain=("a",)), id="one drains"),
        pytest.param([job("a", "draining", used=NOW)], 20, Wake(("a",)), id="one has drained"),
    ],
)
def test_decisions(others: Sequence[Contender], free: int, decision: policy.Decision) -> None:
    assert policy.decide(ME, others, TOTAL, {GPU: free, OTHER: 100}, NOW) == decision


def test_a_job_that_can_never_fit_is_an_error_at_once() -> None:
    large = replace(ME, needs={GPU: 101})
    assert policy.decide(large, [], TOTAL, TOTAL, NOW) == Never(GPU, 101, 100)
    lost = replace(ME, needs={"GPU-lost": 1})
    assert policy.decide(lost, [], TOTAL, TOTAL, NOW) == Never("GPU-lost", 1, 0)


def test_a_job_on_two_gpus_waits_for_both() -> None:
    both = replace(ME, needs={GPU: 40, OTHER: 40})
    idle, busy = job("a"), job("b", needs={OTHER: 90}, **BUSY)
    assert policy.decide(both, [idle, busy], TOTAL, {GPU: 20, OTHER: 10}, NOW) == Wait(("a", "b"), drain=("b",))
    assert policy.decide(
        both, [idle, replace(busy, open_requests=0, used_s=0.0)], TOTAL, {GPU: 20, OTHER: 10}, NOW
    ) == (Wake(("b", "a")))


def test_a_job_that_never_ran_has_its_gpus_for_itself() -> None:
    new = replace(ME, needs=None, may_use=(GPU,))
    assert policy.decide(new, [job("b", needs={OTHER: 10}, **BUSY)], TOTAL, TOTAL, NOW) == Wake()
    assert policy.decide(new, [job("a"), job("b", **FRESH)], TOTAL, TOTAL, NOW) == Wait(("a", "b"))
    assert policy.decide(new, [job("a"), job("b", used=700)], TOTAL, TOTAL, NOW) == Wake(("a", "b"))


MODELS = {GPU: "H100", OTHER: "H100", "GPU-2": "H100", "GPU-3": "L4"}


@pytest.mark.parametrize(
    ("needs", "allowed", "free", "places"),
    [
        pytest.param({GPU: 40}, (), {}, [], id="nothing is allowed"),
        pytest.param({GPU: 40}, ("GPU-3",), {}, [], id="another model"),
        pytest.param({"GPU-lost": 40}, tuple(MODELS), {}, [], id="its GPU is lost"),
        pytest.param({GPU: 40, "GPU-3": 1}, tuple(MODELS), {}, [], id="on two models"),
        pytest.param(None, tuple(MODELS), {}, [], id="it has never run"),
        pytest.param(
            {GPU: 40}, tuple(MODELS), {OTHER: 10, "GPU-2": 20}, [{GPU: "GPU-2"}, {GPU: OTHER}], id="the emptiest first"
        ),
        pytest.param({GPU: 40}, (OTHER,), {"GPU-2": 20}, [{GPU: OTHER}], id="named ones only"),
        pytest.param(
            {GPU: 10, OTHER: 40}, tuple(MODELS), {GPU: 5, OTHER: 1, "GPU-2": 20}, [{OTHER: "GPU-2", GPU: GPU}],
            id="the largest part to the emptiest",
        ),
    ],
)  # fmt: skip
def test_places(
    needs: dict[str, int] | None, allowed: Sequence[str], free: dict[str, int], places: list[dict[str, str]]
) -> None:
    found = list(policy.places(replace(ME, needs=needs), MODELS, allowed, free))
    assert found == [{uuid: uuid for uuid in needs or {}}, *places]


@pytest.mark.parametrize(
    ("others", "place", "decision"),
    [
        pytest.param([job("a", needs={GPU: 50})], GPU, Wake(), id="there is room on its own"),
        pytest.param([job("a", needs={GPU: 80})], OTHER, Wake(), id="an idle one stays if another GPU has room"),
        pytest.param(
            [job("a", needs={GPU: 80}), job("b", needs={OTHER: 80})], GPU, Wake(("a",)), id="its own, if both are idle"
        ),
        pytest.param(
            [job("a", needs={GPU: 80}, **BUSY), job("b", needs={OTHER: 80})], OTHER, Wake(("b",)), id="the idle one"
        ),
        pytest.param(
            [job("a", needs={GPU: 80}, **BUSY), job("b", needs={OTHER: 80}, **BUSY)],
            GPU, Wait(("a",), drain=("a",)), id="it waits for its own",
        ),
    ],
)  # fmt: skip
def test_where_it_wakes(others: Sequence[Contender], place: str, decision: policy.Decision) -> None:
    free = {uuid: 100 - sum((each.needs or {}).get(uuid, 0) for each in others) for uuid in TOTAL}
    where = list(policy.places(ME, {GPU: "H100", OTHER: "H100"}, (OTHER,), free))
    assert policy.choose(ME, where, others, TOTAL, free, NOW) == ({GPU: place}, decision)


@pytest.mark.parametrize("phase", ["asleep", "waiting", "waking", "falling-asleep", "unstarted", "gone"])
def test_only_a_job_that_serves_makes_room(phase: Phase) -> None:
    assert policy.makes_room(job("a", phase), ME, NOW) == "no"


class Day:
    """A machine with one GPU, and jobs that are asked at random, in steps of a tenth of a second."""

    def __init__(self, seed: int, jobs: int) -> None:
        self.dice = random.Random(seed)  # noqa: S311 - the same day each time
        self.now_s = 100.0
        sizes = [self.dice.choice((20, 40, 60, 100)) for _ in range(jobs)]
        self.jobs = {
            f"job-{number}": replace(
                job(f"job-{number}", "asleep", needs={GPU: size}, priority=self.dice.choice((50, 100, 100, 200))),
                stay_s=1.0,
            )
            for number, size in enumerate(sizes)
        }
        self.asked: dict[str, float] = {}
        self.waits: list[float] = []
        self.moves = 0

    @property
    def free(self) -> int:
        """What is not in use."""
        return 100 - sum((each.needs or {})[GPU] for each in self.jobs.values() if each.phase in policy.ON_GPU)

    def change(self, name: str, **changes: object) -> None:
        """A job has changed."""
        self.jobs[name] = replace(self.jobs[name], **changes)

    def ask(self, name: str) -> None:
        """A request comes; it takes a while once the job serves."""
        each = self.jobs[name]
        if each.phase == "asleep":
            self.change(name, phase="waiting", waits_since_s=self.now_s)
        elif each.phase == "serving":
            self.change(name, open_requests=1, used_s=self.now_s)

    def step(self, share: float) -> None:
        """Requests come and end, and every waiting job decides in some order."""
        self.now_s += 0.1
        for name in self.jobs:
            if self.dice.random() < share:
                self.ask(name)
            elif self.jobs[name].open_requests and self.dice.random() < 0.3:
                self.change(name, open_requests=0, used_s=self.now_s)
        drained: set[str] = set()
        waiting = [name for name, each in self.jobs.items() if each.phase == "waiting"]
        for name in self.dice.sample(waiting, len(waiting)):
            self.decide(name, drained)
        for name, each in self.jobs.items():
            if each.phase == "draining" and name not in drained:
                self.change(name, phase="serving")

    def decide(self, name: str, drained: set[str]) -> None:
        """One job's turn."""
        me = self.jobs[name]
        others = [each for each in self.jobs.values() if each.name != name]
        decided = policy.decide(me, others, {GPU: 100}, {GPU: self.free}, self.now_s)
        if isinstance(decided, Wait):
            for other in decided.drain:
                drained.add(other)
                self.change(other, phase="draining")
            return
        assert isinstance(decided, Wake)
        for victim in decided.victims:
            found = self.jobs[victim]
            assert found.phase in ("serving", "draining")
            assert not found.open_requests or found.priority < me.priority, "an open request was interrupted"
            assert policy.is_idle(found, self.now_s) or self.now_s - found.since_s >= found.stay_s
            interrupted = bool(found.open_requests)
            self.change(
                victim, phase="waiting" if interrupted else "asleep",
                waits_since_s=self.now_s if interrupted else None, open_requests=0,
            )  # fmt: skip
        self.waits.append(self.now_s - (me.waits_since_s or 0.0))
        self.moves += 1
        self.change(
            name, phase="serving", open_requests=1, used_s=self.now_s, since_s=self.now_s, waits_since_s=None
        )  # fmt: skip
        assert self.free >= 0, "more was put on the GPU than it has"


@pytest.mark.parametrize("seed", range(200 if IS_STORM else 20))
def test_random_days(seed: int) -> None:
    day = Day(seed, jobs=6)
    for _ in range(300):
        day.step(share=0.1)
    assert day.moves > 5
    longest_s = max(
        (day.now_s - (each.waits_since_s or 0.0) for each in day.jobs.values() if each.phase == "waiting"), default=0.0
    )
    same = len({each.priority for each in day.jobs.values()}) == 1
    assert not same or longest_s < 15.0


def test_two_that_are_asked_all_the_time_alternate_in_slices() -> None:
    day = Day(0, jobs=2)
    for name in day.jobs:
        day.change(name, needs={GPU: 60}, priority=100)
    served = dict.fromkeys(day.jobs, 0)
    for _ in range(1200):
        day.step(share=1.0)
        for name, each in day.jobs.items():
            served[name] += each.phase in ("serving", "draining")
            if each.open_requests and day.dice.random() < 0.3:  # answered, and asked again at once
                day.change(name, open_requests=0, used_s=day.now_s)
    assert day.moves <= 120 / 1.0, "they stayed for less than a slice"
    assert day.moves >= 40, "one had to wait for several slices"
    assert min(served.values()) > 0.4 * sum(served.values()), served


def test_nobody_starves_among_ten() -> None:
    day = Day(3, jobs=10)
    for name in day.jobs:
        day.change(name, needs={GPU: 25}, priority=100)
    for _ in range(3000):
        day.step(share=0.04)
    assert len(day.waits) > 200
    assert max(day.waits) < 10.0
