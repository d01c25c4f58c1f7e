"""Signals that come while gpucr still loads: nothing was begun, and the exit code says so to who started it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.counter import DEADLINE_S
from tests.storm import later

pytestmark = pytest.mark.in_turn

_SEND_WHILE_IMPORTING = """
import os, sys
module, number = sys.argv[1], int(sys.argv[2])
sys.argv[:] = ["gpucr", *sys.argv[3:]]
def send(event, arguments):
    global module
    if event == "import" and arguments[0] == module:
        module = None
        os.kill(os.getpid(), number)
sys.addaudithook(send)
from gpucr.__main__ import main
main()
"""

TERM, INT, HUP, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


def end_of(module: str, number: signal.Signals, *arguments: object) -> tuple[int, str]:
    """Exit status and errors of a gpucr that gets the signal when it imports that module."""
    done = subprocess.run(
        [sys.executable, "-c", _SEND_WHILE_IMPORTING, module, str(int(number)), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("module", "number", "options", "code"),
    [
        ("click", TERM, (), 99),
        ("gpucr.cli.main", USR1, (), 99),
        later("gpucr.cli.options", TERM, (), 99),
        ("gpucr.batch.contract", TERM, ("--requeue-exit", 75), 75),
        later("gpucr.batch.contract", USR1, (), 99),
        ("gpucr.store.local", HUP, ("--on", "HUP"), 99),
        ("gpucr.store.local", TERM, ("--one-job", "--node", 0, "--nodes", 2, "--rendezvous", "n1:7788"), 99),
        ("gpucr.batch.contract", INT, (), 130),
    ],
)
def test_a_job_of_a_batch_system_has_to_be_started_again(
    tmp_path: Path, module: str, number: signal.Signals, options: tuple[object, ...], code: int
) -> None:
    left = tmp_path / "began"
    command = ("batch", "--to", tmp_path / "store", "--id", "early", *options, "--", "touch", left)
    status, errors = end_of(module, number, *command)
    assert status == code, errors
    assert "Traceback" not in errors
    assert ("it has to be started again" in errors) == (code != 130)
    assert not left.exists()
    assert (tmp_path / "store").exists() == (code != 130), "a second start does not make the store"


@pytest.mark.parametrize("command", ["state", later("run"), later("borrow"), later("supervise"), later("dump")])
def test_every_other_command_says_that_it_was_interrupted(command: str) -> None:
    """Before it handles signals, the kernel says so: 143 in a shell, and 129 after SIGHUP."""
    for number, early in ((TERM, -TERM), (INT, 130), (HUP, -HUP)):
        assert end_of("click", number, command)[0] == early
        status, errors = end_of("gpucr.cli.options", number, command)
        assert (status, "Traceback" in errors) == (130, False), errors
