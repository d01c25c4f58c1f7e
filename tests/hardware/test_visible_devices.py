"""The script that moves programs between GPUs whose order they chose: on two simulated GPUs it runs as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MakeMachine
from tests.storm import long

SCRIPT = Path(__file__).with_name("visible_devices.py")


@long
@pytest.mark.criu
def test_each_way(machine: MakeMachine, tmp_path: Path) -> None:
    machine("2x1GiB")
    words = ["--gib", "0.0625", "--times", "1", "--to", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], env=os.environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 times on the right GPU, every word as written") == 3
