"""Fixtures that several unit tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit import counting
from tests.unit.counting import Counting, Start, Variant


@pytest.fixture(scope="session")
def counting_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled program with counting threads."""
    return counting.build(tmp_path_factory.mktemp("counting"))


@pytest.fixture
def start(counting_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start programs with counting threads; they are ended with the test."""
    with contextlib.ExitStack() as started:

        def start_one(variant: Variant = "") -> Counting:
            return started.enter_context(counting.running(counting_program, tmp_path_factory.mktemp("run"), variant))

        yield start_one


@pytest.fixture
def target(start: Start) -> Counting:
    """One running program with counting threads."""
    return start()
