"""Containers under CRIU 4.1.1, which current distributions have.

On Linux 6.16 and newer it cannot dump sockets, so the counters of these tests have none.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucr.criu.install import CriuInstall, least_version
from tests.containers.conftest import StartContainer
from tests.containers.container import Container, wait_gone
from tests.containers.test_containers import gpu_part
from tests.counter import wait_until
from tests.storm import long

pytestmark = pytest.mark.criu


def used_criu(container: Container, action: str) -> str:
    """What CRIU says about itself in its log."""
    log = Path(container.work / f"{action}.log").read_text(errors="replace")
    return next(line.partition("Version: ")[2].split()[0] for line in log.splitlines() if "Version: " in line)


@pytest.mark.parametrize("runtime", [pytest.param("crun", marks=long), "runc"], indirect=True)
def test_a_container_is_left_running_ended_and_restored(container: StartContainer, criu_4_1_1: CriuInstall) -> None:
    counters = 3
    made = container("--mib", "4", "--fork", "2", counters=counters, criu=criu_4_1_1, by_file=True)
    assert [made.ask(index) for index in range(counters)] == [101] * counters

    done = made.checkpoint("--leave-running")
    assert done.returncode == 0, done.stderr
    assert used_criu(made, "dump") == "4.1.1"
    assert [made.ask(index) for index in range(counters)] == [102] * counters
    assert made.verify() == ["ok"] * counters
    assert gpu_part(made).manifest.left_running

    made.use_images("second")
    done = made.checkpoint()
    assert done.returncode == 0, done.stderr
    wait_gone(made.pid)
    gpu_part(made).verify()

    for _ in range(2):
        done = made.restore()
        assert done.returncode == 0, done.stderr
        assert used_criu(made, "restore") == "4.1.1"
        made.wait_ready()
        assert [made.ask(index) for index in range(counters)] == [103] * counters
        assert made.verify() == ["ok"] * counters
        made.end()


def test_a_socket_it_cannot_dump_leaves_the_container_unchanged(
    container: StartContainer, criu_4_1_1: CriuInstall
) -> None:
    if least_version() <= criu_4_1_1.version:
        pytest.skip("on Linux before 6.16 it can dump sockets")
    made = container("--mib", "4", criu=criu_4_1_1)
    done = made.checkpoint()
    assert done.returncode != 0
    assert "Can't get 1:16 opt: Operation not supported" in (made.work / "dump.log").read_text(errors="replace")
    assert made.ask() == 101
    assert made.verify() == ["ok"]
    wait_until(lambda: not (made.images / "gpucr").exists(), "the unfinished GPU part to be removed")
