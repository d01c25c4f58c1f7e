"""Simulated machines for the tests of operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucr.driver.gpus import list_gpus
from gpucr.sim import build as simulator
from tests.operations.stepping import Job, SandboxedJob, StartJob
from tests.sandboxed import end_all_in

MakeMachine = Callable[..., list[str]]


@pytest.fixture
def machine(sim_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MakeMachine:
    """Switch to a simulated machine with these GPUs; returns their UUIDs."""

    def be_on(gpus: str, name: str = "local") -> list[str]:
        variables = simulator.environment(gpus, state_dir=tmp_path / f"gpus-of-{name}", machine=name)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        return [gpu.uuid for gpu in list_gpus()]

    return be_on


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The working folder of a test's jobs, whose processes end with the test."""
    made = tmp_path / "job"
    made.mkdir()
    yield made
    end_all_in(made)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartJob]:
    """Start programs of `tests.operations.stepping`; they are killed at the end of the test."""
    with _jobs(Job, tmp_path / "job") as start_job:
        yield start_job


@pytest.fixture
def start_sandboxed(tmp_path: Path) -> Iterator[StartJob]:
    """The same in namespaces of their own."""
    with _jobs(SandboxedJob, tmp_path / "sandboxed") as start_job:
        yield start_job


@contextlib.contextmanager
def _jobs(kind: type[Job], folder: Path) -> Iterator[StartJob]:
    jobs: list[Job] = []

    def start_job(code: str) -> Job:
        jobs.append(kind(folder.with_name(f"{folder.name}-{len(jobs)}"), code))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.kill()
