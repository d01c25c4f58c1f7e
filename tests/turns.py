"""Tests that take long, in turn: continuous integration has time for a part of them.

``GPUCR_TURN=2/4`` leaves out those that have their turn in 1/4, 3/4 and 4/4. Without it all run.
"""

from __future__ import annotations

import os
import re
import zlib

import pytest

VARIABLE = "GPUCR_TURN"
LONG = ("criu", "in_turn")
"""Markers. A test that dumps and restores a job takes 2 s, and all of these nearly two thirds of the time."""


def turn() -> tuple[int, int] | None:
    """Which turn it is, from 0, and of how many; None: all tests run. Raises pytest.UsageError."""
    said = os.environ.get(VARIABLE, "")
    if not said:
        return None
    parts = re.fullmatch(r"([1-9]\d?)/([1-9]\d?)", said)
    if parts is None or int(parts[1]) > int(parts[2]):
        raise pytest.UsageError(f"{VARIABLE}={said} is no turn, such as 2/4")
    return int(parts[1]) - 1, int(parts[2])


def has_turn(name: str, now: int, turns: int) -> bool:
    """Whether the test of this name is one of those that run now: the same for every run and machine."""
    return zlib.crc32(name.encode()) % turns == now


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that have their turn, and all that do not take long."""
    current = turn()
    if current is None:
        return
    others = [
        item
        for item in items
        if any(item.get_closest_marker(name) for name in LONG) and not has_turn(item.nodeid, *current)
    ]
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=others)
