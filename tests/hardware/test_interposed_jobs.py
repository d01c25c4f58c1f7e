"""The hardware script for interposed jobs, on the simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpucr.criu.install import CriuInstall
from tests.storm import long

SCRIPT = Path(__file__).with_name("interposed_jobs.py")


@long
def test_a_job_that_shares_memory_by_descriptors(
    sim_only: None, criu_install: CriuInstall, tmp_path: Path, state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCR_INTERPOSER_DIR", str(tmp_path / "agents"))
    monkeypatch.setenv("GPUCR_SIM_FIXED_COST_MS", "1")
    words = ["--only", "cumem", "--cycles", "1", "--dumps", "1", "--moves", "1", "--json", str(tmp_path / "told.json")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], env=os.environ, capture_output=True, text=True, check=False, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = json.loads((tmp_path / "told.json").read_text())
    assert (told["way"], told["cycles"], told["error"]) == ("cumem", 1, None)
    assert len(told["dump"]) == len(told["restore"]) == len(told["move"]) == 1
