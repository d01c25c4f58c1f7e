"""Machines for tests. ``scripts/machines`` runs all of these tests; a run of the others has the quick ones alone."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.conftest import skip_or_fail
from tests.machines.images import (
    BOOKWORM,
    REPOSITORY,
    Image,
    MachinesMissing,
    Release,
    build_images,
    find_images,
)
from tests.machines.machine import Hardware, Machine, Wire
from tests.machines.results import FILE, Results
from tests.patience import PATIENCE
from tests.ports import lasting_port

USUAL = Hardware()
IS_CHOSEN = os.environ.get("GPUCR_MACHINES", "") not in ("", "0")
_LIMIT_S = 1800 * PATIENCE
_RESULTS = Results()


class Boot(Protocol):
    """Makes machines, which end with the test."""

    def __call__(
        self,
        release: Release = BOOKWORM,
        hardware: Hardware = USUAL,
        *,
        kernel: str | None = None,
        options: str = "",
    ) -> Machine: ...


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out all that take long, unless ``scripts/machines`` asks for them."""
    left_out = pytest.mark.skip(reason="takes long: `scripts/machines` has it")
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(_LIMIT_S))
        if not IS_CHOSEN and item.path.name not in ("test_machines.py", "test_smoke.py"):
            item.add_marker(left_out)


def _name(item: pytest.Item) -> str:
    return f"{item.path}::{item.name}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember what passed and failed."""
    report = yield
    if report.when == "call" and report.outcome != "skipped":
        _RESULTS.ended(_name(item), report.outcome)
    return report


def pytest_sessionfinish() -> None:
    """Note it for everybody, where everything was asked for."""
    if IS_CHOSEN:
        _RESULTS.write()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what ran on which machine, and where that is noted."""
    lines = _RESULTS.lines()
    if not lines or not IS_CHOSEN:
        return
    terminalreporter.section("machines")
    for line in lines:
        terminalreporter.write_line(line)
    terminalreporter.write_line(
        f"{FILE.relative_to(REPOSITORY)} has what passed: `python3 -m tests.docs` makes pages of it"
    )


@pytest.fixture(scope="session")
def images() -> dict[Release, Image]:
    """What machines boot from; skips the test where they cannot boot."""
    try:
        found = build_images() if IS_CHOSEN else find_images()
        if not IS_CHOSEN and not found[BOOKWORM].booted(found[BOOKWORM].kernels[BOOKWORM.kernel]).exists():
            raise MachinesMissing("no machine has booted yet, which takes long: scripts/machines boots one")
        return found
    except MachinesMissing as e:
        skip_or_fail("machines", str(e))
        raise


@pytest.fixture
def boot(images: dict[Release, Image], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Boot]:
    """Boots machines for the test, with gpucr of this clone; they end with the test."""
    machines: list[Machine] = []

    def make(
        release: Release = BOOKWORM,
        hardware: Hardware = USUAL,
        *,
        kernel: str | None = None,
        options: str = "",
    ) -> Machine:
        number = len(machines) + 1
        machine = Machine(images[release], tmp_path / f"machine-{number}", hardware, number)
        machines.append(machine)
        machine.start(kernel, options, is_new=True)
        return machine

    yield make
    for machine in machines:
        _RESULTS.booted(_name(request.node), machine.booted)
        machine.close()


@pytest.fixture
def wire() -> Wire:
    """A cable for the machines of one test."""
    return Wire(lasting_port())
