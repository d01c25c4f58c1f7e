"""The output of `gpucr`: readers that end early, full disks, closed descriptors, undecodable names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpucr.errors import OutputLost
from tests import command
from tests.counter import DEADLINE_S

PRINTS = ["explain"]
"""A command that prints, and needs nothing of the machine."""

FAILS = ["logs", "no-such-job"]


@pytest.fixture(autouse=True)
def registry_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def _run(arguments: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command.command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_a_closed_pipe_is_not_a_failure() -> None:
    """`gpucr dump ... | head -1`: the operation succeeded, and exit code 1 would deny that."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = _run(PRINTS, stdout=write_end)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_differs_from_a_failure() -> None:
    with open("/dev/full", "wb") as full:
        done = _run(PRINTS, stdout=full.fileno())
    assert done.returncode == OutputLost.exit_code == 7
    assert done.stderr.splitlines() == [
        "error: what was to be printed cannot be written to stdout: No space left on device",
        "hint:  the operation succeeded; `gpucr jobs` and `gpucr ps` show what became of a job",
        "code:  GPUCR-OUTPUT-LOST",
    ]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_failure_keeps_its_exit_code_where_stdout_is_full(options: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = _run(["state", "no-such-job", *options], stdout=full.fileno())
    assert done.returncode == 2
    assert "there is no job" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("arguments", "expected"), [(["jobs"], 0), (FAILS, 2)], ids=["done", "failed"])
def test_closed_descriptors(closed: str, arguments: list[str], expected: int) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *command.command(*arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    is_lost = ">&-" in closed.split() and expected == 0
    assert done.returncode == (OutputLost.exit_code if is_lost else expected)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["utf-8:strict", "latin-1:strict"])
def test_undecodable_names_are_escaped(encoding: str, tmp_path: Path) -> None:
    """utf-8:strict is what Python has for stdout in a locale such as en_US.UTF-8."""
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    arguments = ["run", "--explain", "--no-isolate", "--cwd", str(folder), sys.executable]
    done = command.run(*arguments, env={"PYTHONIOENCODING": encoding})
    assert done.returncode == 0, done.stderr
    assert f"in          {tmp_path}/\\udcff\n" in done.stdout


def test_json_with_an_undecodable_name_is_valid(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    arguments = ["run", "--explain", "--json", "--cwd", str(folder), sys.executable]
    done = command.run(*arguments, env={"PYTHONIOENCODING": "utf-8:strict"})
    assert json.loads(done.stdout)["cwd"] == str(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("arguments", "expected"), [(["jobs"], 0), (FAILS, 2)], ids=["done", "failed"])
def test_a_signal_after_the_end_does_not_change_the_exit_code(arguments: list[str], expected: int, number: int) -> None:
    """The second Ctrl-C of an impatient user, who would otherwise believe that the dump failed."""
    program = (
        f"import atexit, os, sys; atexit.register(os.kill, os.getpid(), {number})\n"
        "from gpucr.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == expected, done.stderr
