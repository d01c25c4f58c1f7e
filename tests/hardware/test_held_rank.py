"""The script whose attempts to lock a job fail: on the simulated driver it runs as a whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hardware import gang_lock


@pytest.mark.parametrize("how", ["leader", "hammer"])
def test_an_abandoned_lock_leaves_the_simulated_job_alive(sim_only: None, tmp_path: Path, how: str) -> None:
    words = ["--program", "sim", "--ranks", "3", "--seconds", "0.5", "--how", how, "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "tests/hardware/held_rank.py", *words],
        cwd=gang_lock.ROOT, env={**os.environ, "PYTHONPATH": "src"}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "out" / "held_rank.json").read_text())
    assert (told["ok"], told["how"]) == (True, how)
    assert "still had GPU work pending" in told["said"] or "timed out" in told["said"]
