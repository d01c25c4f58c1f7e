"""The script that measures CUDA IPC: on the simulated driver it runs as a whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.hardware import gang_lock


def test_it_reports_what_was_restored_and_lost(sim_only: None, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "tests/hardware/cuda_ipc.py", "--cases", "nothing,memory_open", "--json", str(report)],
        cwd=gang_lock.ROOT, env={**os.environ, "PYTHONPATH": "src"}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads(report.read_text())["cases"]
    assert cases["nothing"]["outcome"] == "2 processes come back"
    assert (cases["nothing"]["before"], cases["nothing"]["after"]) == ("A right, B right", "A right, B right")
    assert "gave 1, state checkpointed" in cases["memory_open"]["outcome"]
    assert cases["memory_open"]["after"] == "not asked"
