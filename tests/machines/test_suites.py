"""The tests of this repository, in machines: other kernels, cgroup version 2 alone and hybrid, CRIU 4.1 and 4.2."""

from __future__ import annotations

import pytest

from tests.machines.conftest import Boot
from tests.machines.images import BOOKWORM, TESTS, TRIXIE, Release
from tests.machines.machine import Machine

_HYBRID = "systemd.unified_cgroup_hierarchy=0"
_EVERYWHERE = (
    "tests/linux/test_cgroups.py tests/scenarios/test_memory_limit.py tests/network/test_connections.py "
    "tests/conformance"
)
_OPERATIONS = "tests/operations/test_dump_restore.py tests/operations/test_freeze.py"
_LIMIT_S = 1700.0
_FOLDER = "/var/tmp/tests"  # Debian 13 has /tmp in memory, where a dump needs twice the room


def _passes(machine: Machine, tests: str, **variables: str) -> None:
    """Runs them there; a failure has the end of what pytest printed, and the console all of it, meanwhile."""
    words = f"python3 -m pytest -v -p no:cacheprovider --timeout 600 --basetemp {_FOLDER} {tests}"
    tested = machine.run(
        f"set -o pipefail; cd {TESTS} && {words} 2>&1 | tee /dev/console",
        check=False,
        limit_s=_LIMIT_S,
        GPUCR_REQUIRE="criu,root",
        GPUCR_TEST_PATIENCE="10",
        **variables,
    )
    assert tested.returncode == 0, "\n".join(tested.stdout.splitlines()[-80:])


@pytest.mark.parametrize(
    ("release", "kernel", "options"),
    [
        pytest.param(BOOKWORM, "6.1", "", id="12-6.1"),
        pytest.param(TRIXIE, "6.12", "", id="13-6.12"),
        pytest.param(BOOKWORM, "6.12", "", id="12-6.12"),
        pytest.param(TRIXIE, "6.1", "", id="13-6.1"),
        pytest.param(BOOKWORM, "6.1", _HYBRID, id="12-6.1-hybrid"),
    ],
)
def test_kernels_and_cgroups(boot: Boot, release: Release, kernel: str, options: str) -> None:
    _passes(boot(release, kernel=kernel, options=options), _EVERYWHERE)


@pytest.mark.parametrize("release", [BOOKWORM, TRIXIE], ids=["12-6.1", "13-6.12"])
def test_the_main_operations(boot: Boot, release: Release) -> None:
    """CRIU is 4.2 on Debian 12 and 4.1 on 13."""
    _passes(boot(release), _OPERATIONS)


def test_shortage(boot: Boot) -> None:
    _passes(boot(), "tests/inside/test_shortage.py", GPUCR_INSIDE="1")


@pytest.mark.parametrize("release", [BOOKWORM, TRIXIE], ids=lambda release: release.name)
def test_hardened(boot: Boot, release: Release) -> None:
    _passes(boot(release), "tests/inside/test_hardened.py", GPUCR_INSIDE="1")
