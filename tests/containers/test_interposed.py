"""A container whose programs load the interposer: its folder is mounted, and a variable names it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from gpucr.interposer import library
from gpucr.interposer.client import Agent
from gpucr.snapshot.folder import GPU_PART_NAME, Snapshot
from tests.compiled import compiled_interposer
from tests.containers.conftest import StartContainer

pytestmark = pytest.mark.criu


def has_its_agent(pid: int) -> bool:
    with Agent(pid) as agent:
        return agent.close_gate(5).is_empty


def test_its_agent_is_reachable_also_after_a_restore(
    container: StartContainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpucr.interposer.library._SHIPPED", compiled_interposer())
    monkeypatch.setattr("gpucr.interposer.library._home", lambda: tmp_path / "interposer")
    made = container("--mib", "16", interposer=library.installed())
    assert made.ask() == 101
    assert has_its_agent(made.pid)
    done = made.checkpoint()
    assert done.returncode == 0, done.stderr
    with contextlib.closing(Snapshot.open(made.images / GPU_PART_NAME)) as part:
        assert "interposed" in part.manifest.kinds.values()
    done = made.restore()
    assert done.returncode == 0, done.stderr
    made.wait_ready()
    assert has_its_agent(made.pid)
    assert (made.ask(), made.verify()) == (102, ["ok"])
