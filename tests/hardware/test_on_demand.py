"""The harness of on_demand.py: it notices what is wrong, and runs as a whole on the simulated driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpucr.sim import build as simulator
from tests.conftest import FIXED_COST_MS
from tests.hardware.main_job import ROOT
from tests.hardware.on_demand import Outcome, Row, changes, percentile, table
from tests.storm import later


def test_times_are_judged_one_by_one() -> None:
    assert Row("asleep", [1.1, 2.1], [1.0, 2.0], 0.2).is_good
    assert not Row("asleep", [1.1, 2.3], [1.0, 2.0], 0.2).is_good
    assert Row("cold start", [100.0]).is_good


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Outcome("simulated", 1, 1, rows=[Row("asleep", [9.0], [1.0], 0.2)]), "TOO LONG"),
        (Outcome("simulated", 1, 1, wrong=["model-0 seed 1: 'a', not 'b'"]), "WRONG model-0 seed 1"),
        (Outcome("simulated", 1, 1, errors=["requests: nobody answered"]), "FAILED requests: nobody answered"),
    ],
)
def test_a_failure_is_in_the_table(outcome: Outcome, words: str) -> None:
    assert not outcome.is_good
    assert words in table(outcome)


def test_percentiles() -> None:
    values = [float(number) for number in range(100)]
    assert (percentile(values, 0.95), percentile([3.0], 0.95)) == (95.0, 3.0)


def test_samples_that_show_nothing_new_are_left_out() -> None:
    one, more, awake = (0.1, 1 << 30, ()), (0.3, 2 << 30, ()), (0.4, 2 << 30, ("model-0",))
    assert changes([one, (0.2, 3 << 29, ()), more, awake, (0.5, 2 << 30, ("model-0",))]) == [one, more, awake]


@pytest.mark.root
@pytest.mark.usefixtures("sim_only")
@pytest.mark.parametrize("kind", [later("three", id="three"), later("ten", id="ten")])
def test_on_the_simulated_driver(tmp_path: Path, kind: str) -> None:
    variables = simulator.environment(
        "1x200MiB", state_dir=tmp_path / "gpus", machine=tmp_path.name, fixed_cost_ms=FIXED_COST_MS
    )
    words = {
        "three": ["--gib", "80", "--requests", "60", "--rounds", "1"],
        "ten": ["--small", "--gib", "8", "--requests", "60"],
    }
    done = subprocess.run(
        [sys.executable, "tests/hardware/on_demand.py", "--program", "simulated", *words[kind],
         "--json", str(tmp_path / "results")],
        cwd=ROOT, env={**os.environ, **variables, "GPUCR_INTERPOSE": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = json.loads((tmp_path / "results").read_text())
    assert (found["errors"], found["wrong"], found["requests"]) == ([], [], 60), done.stdout + done.stderr
    assert min(map(len, found["waits"].values())) > 0
    assert "60 requests" in done.stdout
    assert len({tuple(awake) for _, _, awake in found["memory"]}) > 2
