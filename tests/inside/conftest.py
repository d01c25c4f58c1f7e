"""What these tests act with and on. They are skipped outside of a machine of `tests.machines`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import command


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave them out unless the machine is one that may be spoilt."""
    if os.environ.get("GPUCR_INSIDE") != "1":
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="runs in a machine of its own: `scripts/machines` has it"))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[str]:
    """A running job, by its name; ended with the test."""
    name = tmp_path.name
    counts = "import itertools, time\nfor number in itertools.count(1):\n print(number, flush=True)\n time.sleep(0.05)"
    started = command.run("run", "--name", name, "--", "python3", "-c", counts)
    assert started.returncode == 0, started.stderr
    yield name
    command.run("kill", name)


def sh(script: str) -> str:
    """Run a shell script, which must succeed."""
    return subprocess.run(["bash", "-ec", script], check=True, capture_output=True, text=True).stdout


def is_running(job: str) -> bool:
    """Whether the job runs and has not been stopped."""
    [found] = [each for each in command.run_json("jobs")["jobs"] if each["name"] == job]
    pid = found["pid"]
    return found["state"] == "running" and " T " not in Path(f"/proc/{pid}/stat").read_text()
