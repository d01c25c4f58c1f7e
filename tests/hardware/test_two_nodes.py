"""The hardware script for two nodes, with a job that needs neither a GPU nor torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nodes.conftest import require_networks
from tests.storm import long

SCRIPT = Path(__file__).with_name("two_nodes.py")


@long
@pytest.mark.criu
def test_a_job_goes_from_node_to_node(sim_only: None) -> None:
    require_networks()
    words = ["--only", "sockets", "--times", "2", "--left-running", "1", "--limit", "40"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], env=os.environ, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every line as undisturbed" in done.stdout
    assert "FAILED" not in done.stdout
