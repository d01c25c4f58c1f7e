"""A simulated machine of its own for each test, with GPUs on which two of three models fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.driver.gpus import list_gpus
from gpucr.sim import build as simulator
from tests.conftest import FIXED_COST_MS
from tests.on_demand.models import Models


@pytest.fixture
def gpus(sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Be on a machine with two GPUs of 200 MiB, and a registry of its own. Returns the GPUs' UUIDs."""
    variables = simulator.environment(
        "2x200MiB", state_dir=tmp_path / "gpus", machine=tmp_path.name, fixed_cost_ms=FIXED_COST_MS
    )
    own = {"XDG_STATE_HOME": str(tmp_path / "state"), "GPUCR_INTERPOSE": "0"}
    for variable, value in {**variables, **own}.items():
        monkeypatch.setenv(variable, value)
    return [gpu.uuid for gpu in list_gpus()]


@pytest.fixture
def models(gpus: list[str], tmp_path: Path) -> Iterator[Models]:
    """Models of this test."""
    made = Models(tmp_path, gpus)
    yield made
    made.close()
