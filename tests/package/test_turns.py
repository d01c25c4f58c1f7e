"""Every test that takes long has its turn in one part of continuous integration's runs, and all others in each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import turns

ROOT = Path(__file__).resolve().parents[2]
LONG = "tests/on_demand/test_forwarding.py"
BOTH = (LONG, "tests/package/test_turns.py")


def _collected(turn: str, *paths: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-p", "no:cacheprovider", *paths],
        cwd=ROOT, env={**os.environ, turns.VARIABLE: turn}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_each_long_test_has_one_turn_and_others_have_all() -> None:
    everything = _collected("", *BOTH)
    parts = [_collected(f"{number}/3", *BOTH) for number in (1, 2, 3)]
    often = {name: sum(name in part for part in parts) for name in everything}
    assert set.union(*parts) == everything
    assert set(often.values()) == {1, 3}
    assert {name for name in often if name.startswith(LONG)} == {name for name, count in often.items() if count == 1}


def test_turns_are_nearly_as_long_as_each_other() -> None:
    names = [f"tests/room/test_it.py::test_one[{number}]" for number in range(2000)]
    for now in range(4):
        assert 400 < sum(turns.has_turn(name, now, 4) for name in names) < 600


@pytest.mark.parametrize("said", ["0/4", "5/4", "1", "1/0", "a/b", "1/4 "])
def test_a_turn_that_does_not_exist(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(turns.VARIABLE, said)
    with pytest.raises(pytest.UsageError, match=re.escape(said)):
        turns.turn()


def test_continuous_integration_takes_a_turn_and_a_user_takes_all() -> None:
    assert turns.VARIABLE in (ROOT / ".ci" / "run").read_text()
    assert turns.VARIABLE not in (ROOT / "scripts" / "test").read_text()
