"""``gpucr demo`` as a user runs it: on the GPU where there is one, else on the simulated driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpucr", "demo", "--mib", "11", *arguments],
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def command_lines_with(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        if text in command:
            found.append(command)
    return found


@pytest.mark.criu
def test_every_check_passes_and_nothing_is_left(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ok"] is True
    assert [check["seen"] for check in said["checks"] if "answers" in check["name"]] == ["101", "102"]
    assert all(check["ok"] for check in said["checks"])
    assert {phase["operation"] for phase in said["phases"]} == {"dump", "restore"}
    assert list(tmp_path.iterdir()) == []
    assert command_lines_with("counter --port 0 --mib 11") == []


@pytest.mark.criu
def test_keep_keeps_a_snapshot_that_can_be_inspected(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--keep", str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    snapshot = tmp_path / "kept" / "snapshot"
    inspected = subprocess.run(
        [sys.executable, "-m", "gpucr", "inspect", str(snapshot), "--json"], capture_output=True, text=True, check=False
    )
    assert inspected.returncode == 0, inspected.stderr
    assert json.loads(inspected.stdout)["schema"] == "gpucr.inspect"


def test_a_nonempty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    done = run_demo(tmp_path, "--keep", str(tmp_path))
    assert done.returncode == 2
    assert "is not empty" in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["precious"]
