"""Tests marked ``by_user`` in other files, run again by an unprivileged user."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ordinary_user import OrdinaryUser

pytestmark = [pytest.mark.criu, pytest.mark.timeout(300)]

TESTS = Path(__file__).parents[1]
MARK = "@pytest.mark.by_user"


@pytest.mark.parametrize("in_operations", [True, False], ids=["operations", "other rooms"])
def test_marked_tests_pass_for_an_ordinary_user(user: OrdinaryUser, in_operations: bool) -> None:
    files = [
        file
        for file in sorted(TESTS.glob("*/test_*.py"))
        if (file.parent.name == "operations") == in_operations and file != Path(__file__) and _marked(file)
    ]
    done = user.pytest("-m", "by_user", *map(str, files))
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= sum(map(_marked, files))


def _marked(file: Path) -> int:
    """How many tests of the file are."""
    return len(re.findall(rf"^{re.escape(MARK)}$", file.read_text(), re.MULTILINE))
