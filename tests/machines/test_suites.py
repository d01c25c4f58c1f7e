"""The tests of this repository, in machines: other kernels, cgroup version 2 alone and hybrid, CRIU 4.1 and 4.2."""

from __future__ import annotations

import pytest

from tests.machines.conftest import Boot
from tests.machines.images import BOOKWORM, TESTS, TRIXIE, Release
from tests.machines.machine import Machine

_HYBRID = "systemd.unified_cgroup_hierarchy=0"
_EVERYWHERE = (
    "tests/unit/test_cgroups.py tests/operations/test_memory_limit.py tests/operations/test_connections.py "
    "tests/conformance"
)
_ONCE = (
    f"{_EVERYWHERE} tests/operations/test_dump_restore.py tests/operations/test_freeze.py"  # takes four times as long
)
_LIMIT_S = 1700.0
_FOLDER = "/var/tmp/tests"  # Debian 13 has /tmp in memory, where a dump needs twice the room


def _passes(machine: Machine, tests: str, **variables: str) -> None:
    """Runs them there; a failure has the end of what pytest printed."""
    tested = machine.run(
        f"cd {TESTS} && python3 -m pytest -q -p no:cacheprovider --timeout 600 --basetemp {_FOLDER} {tests} 2>&1",
        check=False,
        limit_s=_LIMIT_S,
        GPUCR_REQUIRE="criu,root",
        **variables,
    )
    assert tested.returncode == 0, "\n".join(tested.stdout.splitlines()[-80:])


@pytest.mark.parametrize(
    ("release", "kernel", "options", "tests"),
    [
        pytest.param(BOOKWORM, "6.1", "", _ONCE, id="12-6.1"),  # CRIU 4.2
        pytest.param(TRIXIE, "6.12", "", _ONCE, id="13-6.12"),  # CRIU 4.1
        pytest.param(BOOKWORM, "6.12", "", _EVERYWHERE, id="12-6.12"),
        pytest.param(TRIXIE, "6.1", "", _EVERYWHERE, id="13-6.1"),
        pytest.param(BOOKWORM, "6.1", _HYBRID, _EVERYWHERE, id="12-6.1-hybrid"),
    ],
)
def test_the_main_operations(boot: Boot, release: Release, kernel: str, options: str, tests: str) -> None:
    _passes(boot(release, kernel=kernel, options=options), tests)


def test_shortage(boot: Boot) -> None:
    _passes(boot(), "tests/inside/test_shortage.py", GPUCR_INSIDE="1")


@pytest.mark.parametrize("release", [BOOKWORM, TRIXIE], ids=lambda release: release.name)
def test_hardened(boot: Boot, release: Release) -> None:
    _passes(boot(release), "tests/inside/test_hardened.py", GPUCR_INSIDE="1")
