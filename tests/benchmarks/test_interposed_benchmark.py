"""How the interposer's benchmark evaluates its times."""

from __future__ import annotations

import pytest

from benchmarks.interposed import Results, checks, standstill
from benchmarks.limits import Limits
from benchmarks.tools import Outcome
from gpucr import Phase

LIMITS = Limits(1e9, 2e9, 1, True, None, 10 * 2**30, 1e10)


def measured(**seconds: float) -> Results:
    results = Results(written={"interposed dump": 10**10})
    for what, value in seconds.items():
        results.add("interposed", what, value)
    return results


def test_downtime_starts_at_the_lock_and_excludes_memory_preparation() -> None:
    phases = tuple(Phase(name, 1.0) for name in ("prepare", "allocate", "lock", "checkpoint"))
    assert standstill(Outcome(phases), 9.0) == 2.0
    assert standstill(Outcome(()), 9.0) == 9.0


@pytest.mark.parametrize(("what", "least_s", "most_s"), [
    ("dump", 11.4, 11.6), ("restore", 5.7, 5.8), ("downtime", 2.0, 2.1), ("move", 1.5, 1.6),
    ("store-downtime", 4.4, 4.5),
])  # fmt: skip
def test_limits(what: str, least_s: float, most_s: float) -> None:
    for seconds, holds in ((least_s, True), (most_s, False)):
        (check,) = checks(measured(**{what: seconds}), {"disk": LIMITS}, 24)
        assert (check.what, check.seconds <= check.allowed_s) == (what, holds)


def test_a_limit_needs_the_plain_driver_in_the_same_run() -> None:
    results = measured(suspend=1.0, resume=1.0)
    assert checks(results, {"disk": LIMITS}, 24) == []
    results.add("plain", "suspend", 8.1)
    results.add("plain", "resume", 3.4)
    assert [(c.what, c.seconds <= c.allowed_s) for c in checks(results, {}, 24)] == [
        ("suspend", True),
        ("resume", False),
    ]
