"""The script that fills GPUs for the others, on the simulator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("filled.py")
LOOK = "from gpucr.driver.gpus import list_gpus; print(*(gpu.memory_free_bytes >> 20 for gpu in list_gpus()))"


@pytest.mark.usefixtures("sim_only")
def test_the_command_finds_all_gpus_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUCR_SIM_STATE", str(tmp_path))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--leave", "0.5", "--", sys.executable, "-c", LOOK + "; raise SystemExit(3)"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert all(505 <= int(word) <= 514 for word in done.stdout.splitlines()[-1].split())
