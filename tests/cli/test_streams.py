"""Every command with every combination of stdin, stdout and stderr that are closed, full, or without a reader."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from gpucr.errors import OutputLost
from tests import command
from tests.docs.command_tree import COMMANDS
from tests.storm import sample

KINDS = ("open", "closed", "full", "broken")
LOST = ("closed", "full")
"""Where output is lost, and nobody has had enough of it: a failure."""
COMBINATIONS = list(itertools.product(("open", "closed"), KINDS, KINDS))
LEAVES = sorted(name for name, found in COMMANDS.items() if not hasattr(found, "commands"))
EXPECTED_FAILURE = 2


def run(program: list[str], stdin: str, stdout: str, stderr: str) -> tuple[int, str]:
    """Run a program so. Returns its exit code, and what it said where stderr is open."""
    closed = [number for number, kind in enumerate((stdin, stdout, stderr)) if kind == "closed"]

    def close() -> None:
        for number in closed:
            os.close(number)

    read_end, write_end = os.pipe()
    os.close(read_end)
    with open("/dev/full", "wb") as full, open(write_end, "wb") as broken:
        files: dict[str, int | IO[bytes]] = {
            "open": subprocess.PIPE,
            "closed": subprocess.DEVNULL,
            "full": full,
            "broken": broken,
        }
        done = subprocess.run(
            program,
            stdin=subprocess.DEVNULL,
            stdout=files[stdout],
            stderr=files[stderr],
            text=True,
            timeout=120,
            check=False,
            preexec_fn=close,
        )
    return done.returncode, done.stderr or ""


def gpucr(arguments: list[str], stdin: str, stdout: str, stderr: str) -> tuple[int, str]:
    return run(command.command(*arguments), stdin, stdout, stderr)


@pytest.fixture(autouse=True)
def state_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))


@pytest.mark.parametrize("leaf", sample(LEAVES, 8))
def test_help_and_a_wrong_option_of_every_command(leaf: str) -> None:
    """One of the combinations for each command: all of them have each one, for what is printed as for what fails."""
    words = leaf.split()[1:]
    turn = LEAVES.index(leaf)
    stdin, stdout, stderr = COMBINATIONS[turn % len(COMBINATIONS)]
    code, said = gpucr([*words, "--help"], stdin, stdout, stderr)
    assert code == (OutputLost.exit_code if stdout in LOST else 0), (leaf, stdin, stdout, stderr, said)
    assert "Traceback" not in said
    code, said = gpucr([*words, "--no-such-option"], stdin, stdout, stderr)
    assert code == EXPECTED_FAILURE, (leaf, stdin, stdout, stderr, said)
    assert "Traceback" not in said


@pytest.mark.parametrize(("stdin", "stdout", "stderr"), sample(COMBINATIONS, 7))
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["jobs"], 0), (["jobs", "--json"], 0), (["explain"], 0), (["state", "no-such-job", "--json"], 2)],
    ids=["jobs", "json", "explain", "fails"],
)
def test_output_that_is_lost(arguments: list[str], expected: int, stdin: str, stdout: str, stderr: str) -> None:
    code, said = gpucr(arguments, stdin, stdout, stderr)
    lost = stdout in LOST and expected == 0
    assert code == (OutputLost.exit_code if lost else expected), said
    assert "Traceback" not in said


def test_a_command_that_prints_nothing_needs_no_stdout(tmp_path: Path) -> None:
    """The man pages go to files."""
    code, said = run([sys.executable, "-m", "gpucr.cli.manual", str(tmp_path / "man")], "open", "closed", "open")
    assert (code, said) == (0, "")
    code, said = gpucr(["jobs", "--json"], "open", "closed", "open")
    assert (code, said.splitlines()[0]) == (
        OutputLost.exit_code, "error: what was to be printed cannot be written to stdout: stdout is closed",
    )  # fmt: skip


@pytest.mark.parametrize(("stdout", "stderr"), list(itertools.product(KINDS, KINDS)))
def test_the_drop_in_cuda_checkpoint(stdout: str, stderr: str) -> None:
    """Its exit codes are 0 and 1, and what it cannot print is a failure."""
    code = "import sys; from gpucr.compat.cuda_checkpoint import main; sys.exit(main())"
    for arguments, works in (("--help", True), ("--no-such-option", False)):
        ended, said = run([sys.executable, "-c", code, arguments], "open", stdout, stderr)
        assert ended == (0 if works and stdout == "open" else 1), said
        assert "Traceback" not in said
