"""A small storm: what `python3 -m tests.supervise.storm` does 500 times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storm import long
from tests.supervise import storm


@long
@pytest.mark.criu
@pytest.mark.timeout(1800)
def test_nothing_is_lost_in_a_storm(sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    outcome = storm.storm(500, seed=7, per_job=10, say=print)
    assert outcome.problems == []
    assert outcome.restores > 0
