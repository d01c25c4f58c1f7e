"""Simulated machines for the tests of operations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpucr.driver.gpus import list_gpus
from gpucr.sim import build as simulator

MakeMachine = Callable[..., list[str]]


@pytest.fixture
def machine(sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MakeMachine:
    """Be on a simulated machine with these GPUs from now on; returns their UUIDs."""

    def be_on(gpus: str, name: str = "local") -> list[str]:
        variables = simulator.environment(gpus, state_dir=tmp_path / f"gpus-of-{name}", machine=name)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        return [gpu.uuid for gpu in list_gpus()]

    return be_on
