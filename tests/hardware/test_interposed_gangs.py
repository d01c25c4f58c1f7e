"""The hardware script for processes that share memory, on the simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storm import long

SCRIPT = Path(__file__).with_name("interposed_gangs.py")


@long
def test_processes_that_share_memory_by_descriptors(
    sim_only: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCR_INTERPOSER_DIR", str(tmp_path / "agents"))
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1")
    words = ["--only", "cumem", "--cycles", "2", "--json", str(tmp_path / "told.json")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], env=os.environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = json.loads((tmp_path / "told.json").read_text())
    assert (told["same"], told["cycles"], sorted(each["imported"] for each in told["processes"])) == (True, 2, [0, 3])
