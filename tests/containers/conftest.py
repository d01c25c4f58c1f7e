"""Containers of the runtimes that this machine has, or can fetch."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpucr.criu.install import CriuInstall
from tests.conftest import skip_or_fail
from tests.containers.container import Container
from tests.containers.runtimes import RuntimeMissing, check_cgroup2, find_criu_4_1_1, find_crun, find_runc

StartContainer = Callable[..., Container]


@pytest.fixture
def runtime(request: pytest.FixtureRequest) -> list[str]:
    """The command of a container runtime, runc if a test does not name one; a visible skip if there is none."""
    name = getattr(request, "param", "runc")
    found = _look_for(name)
    if isinstance(found, RuntimeMissing):
        skip_or_fail("runtimes", f"no {name}: {found}")
        raise found
    return found


@functools.cache
def _look_for(name: str) -> list[str] | RuntimeMissing:
    """Once: a network that does not answer is waited for."""
    try:
        check_cgroup2()
        return find_runc() if name == "runc" else find_crun()
    except RuntimeMissing as e:
        return e


@pytest.fixture(scope="session")
def criu_4_1_1() -> CriuInstall:
    """CRIU 4.1.1; a visible skip if it cannot be fetched."""
    try:
        return find_criu_4_1_1()
    except RuntimeMissing as e:
        skip_or_fail("runtimes", f"no CRIU 4.1.1: {e}")
        raise


@pytest.fixture
def container(
    sim_only: None, runtime: list[str], criu_install: CriuInstall, tmp_path: Path
) -> Iterator[StartContainer]:
    """Start containers: ``container("--mib", "4", counters=3)``. They are ended with the test.

    ``criu``: a CRIU other than the one that gpucr would use. ``kind``: the class of the container.
    """
    started: list[Container] = []

    def start(
        *arguments: str, criu: CriuInstall = criu_install, kind: type[Container] = Container, **options: Any
    ) -> Container:
        folder = tmp_path / f"container-{len(started)}"
        folder.mkdir()
        # It names a cgroup, and the kernel has one tree of them for all who run these tests on the machine.
        name = f"gpucr-{tmp_path.name}-{secrets.token_hex(4)}".replace("_", "-")
        made = kind(folder, name, runtime, criu, arguments, **options)
        started.append(made)
        made.start()
        return made

    yield start
    for made in started:
        made.close()
