"""A terminal that is the job's own, as `docs/how-to/start-a-job.md` shows: it is there again after a restore."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from gpucr.jobs.registered import find_by_pid_or_name
from tests import command
from tests.conftest import skip_or_fail
from tests.counter import wait_until
from tests.storm import later
from tests.terminal import Terminal

_ASKS = """
while True:
    print("you said", input("what? "), flush=True)
"""


@pytest.mark.criu
@pytest.mark.parametrize("isolate", ["--isolate", later("--no-isolate")])
def test_it_comes_back_with_its_screen(isolate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("tmux") is None:
        skip_or_fail("root", "tmux is not installed")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    program, settings, socket = tmp_path / "ask.py", tmp_path / "conf", tmp_path / "socket"
    program.write_text(_ASKS)
    settings.write_text(f'set -s exit-empty on; new-session -d "python3 {program}"\n')
    tmux = ("tmux", "-S", str(socket))
    started = command.run("run", isolate, "--name", "asks", "--", *tmux, "-D", "-f", settings)
    assert started.returncode == 0, started.stderr
    attach = command.command("exec", "asks", "--", *tmux, "attach")
    try:
        screen = ("exec", "asks", "--", *tmux, "capture-pane", "-p")
        wait_until(lambda: "what?" in command.run(*screen).stdout, "the program to ask")
        with contextlib.closing(Terminal(attach)) as seen:
            seen.press("first\n")
            seen.wait_for("you said first")
            refused = command.run("dump", "asks", "--to", tmp_path / "a", "--dry-run")
            assert (refused.returncode, "GPUCR-UNIX-OUTSIDE" in refused.stderr) == (3, True)
            seen.press("\x02d")
            seen.wait_for("detached")
        for number in (1, 2):
            assert command.run("dump", "asks", "--to", tmp_path / f"{number}").returncode == 0
            restored = command.run("restore", tmp_path / f"{number}")
            assert restored.returncode == 0, restored.stderr
        with contextlib.closing(Terminal(attach)) as seen:
            seen.wait_for("you said first")
            seen.press("second\n")
            seen.wait_for("you said second")
            seen.press("\x04")  # the end of its input, and so of the program, of tmux, and of the job
        wait_until(lambda: find_by_pid_or_name("asks").state.word == "ended", "the job to end")
    finally:
        command.run("kill", "asks")
