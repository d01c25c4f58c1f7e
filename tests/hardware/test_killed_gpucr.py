"""The hardware script that kills gpucr, on the simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpucr.criu.install import CriuInstall
from tests.storm import long

SCRIPT = Path(__file__).with_name("killed_gpucr.py")


@long
def test_a_job_survives_its_killed_gpucr(
    sim_only: None, criu_install: CriuInstall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCR_INTERPOSER_DIR", str(tmp_path / "agents"))
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = ["--program", "simulated", "--kills", "5", "--json", str(tmp_path / "told.json")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], env=os.environ, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["error"] is None
    assert [action for action, _, _ in told["told"]] == [
        "suspend", "resume", "dump --leave-running", "dump", "restore",
    ]  # fmt: skip
