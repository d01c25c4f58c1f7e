"""How thorough a test is: normally a sample of its cases, in a storm all of them.

``./scripts/storm`` tries all cases (``GPUCR_STORM=1``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

Case = TypeVar("Case")

_LIMIT_S = 1800
IS_STORM = os.environ.get("GPUCR_STORM", "") not in ("", "0")


def sample(cases: Sequence[Case], every: int) -> list[Case]:
    """Every so many of the cases, the first one and the last one among them; all of them in a storm."""
    if IS_STORM:
        return list(cases)
    return [case for number, case in enumerate(cases) if number % every == 0 or number == len(cases) - 1]


def allow_time(items: Sequence[pytest.Item]) -> None:
    """In a storm one test may try hundreds of cases, and shares its processors with others that do."""
    for item in items if IS_STORM else ():
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_LIMIT_S))


long = pytest.mark.skipif(not IS_STORM, reason="takes long: `scripts/storm` has it")
"""For tests that a run of all leaves out."""


def later(*values: object, id: str | None = None) -> ParameterSet:  # noqa: A002 - pytest's own word
    """A case of a test that a run of all leaves out: another one holds the same behaviour."""
    return pytest.param(*values, marks=long, id=id)
