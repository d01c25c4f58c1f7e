"""A simulated machine of its own for each test: what is chosen by GPU must not meet the jobs of other tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucr.driver.gpus import list_gpus
from gpucr.sim import build as simulator
from tests.conftest import FIXED_COST_MS


@pytest.fixture
def machine(sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Be on a machine with two GPUs, a registry and a borrowing of its own. Returns the GPUs' UUIDs."""
    variables = simulator.environment(
        "2x16GiB", state_dir=tmp_path / "gpus", machine=tmp_path.name, fixed_cost_ms=FIXED_COST_MS
    )
    for variable, value in {**variables, "XDG_STATE_HOME": str(tmp_path / "state")}.items():
        monkeypatch.setenv(variable, value)
    return [gpu.uuid for gpu in list_gpus()]
