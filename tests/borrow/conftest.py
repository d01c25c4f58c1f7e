"""A simulated machine of its own for each test: what is chosen by GPU must not meet the jobs of other tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucr.driver.gpus import list_gpus
from gpucr.linux import memory
from gpucr.sim import build as simulator
from tests.borrow.jobs import Machine
from tests.conftest import FIXED_COST_MS


@pytest.fixture
def machine(sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Be on a machine with two GPUs, a registry and a borrowing of its own. Returns the GPUs' UUIDs."""
    variables = simulator.environment(
        "2x16GiB", state_dir=tmp_path / "gpus", machine=tmp_path.name, fixed_cost_ms=FIXED_COST_MS
    )
    # Without the interposer: a test's own process has the driver of another machine open, which has not these GPUs.
    own = {"XDG_STATE_HOME": str(tmp_path / "state"), "GPUCR_INTERPOSE": "0"}
    for variable, value in {**variables, **own}.items():
        monkeypatch.setenv(variable, value)
    return [gpu.uuid for gpu in list_gpus()]


@pytest.fixture
def shared(machine: list[str], tmp_path: Path) -> Iterator[Machine]:
    """A machine with two GPUs of its own."""
    made = Machine(tmp_path)
    yield made
    made.close()


@pytest.fixture
def in_room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have the machine say that so much host memory is available."""
    return lambda size_bytes: monkeypatch.setattr(memory, "machine_available_bytes", lambda: size_bytes)
