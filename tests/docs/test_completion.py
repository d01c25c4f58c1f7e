"""What a shell is told when it completes a command line of gpucr."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import command
from tests.counter import CounterFactory
from tests.docs.command_tree import COMMANDS


def complete(*words: str, env: dict[str, str] | None = None) -> list[str]:
    """The values that are offered for the last word."""
    asked = {"_GPUCR_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = command.run(env={**asked, **(env or {})})
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_commands() -> None:
    assert complete("gpucr", "sus") == ["suspend"]
    assert set(complete("gpucr", "")) == {name.removeprefix("gpucr ") for name in COMMANDS if name.count(" ") == 1}


def test_commands_are_completed_without_loading_them() -> None:
    code = (
        "import sys, os; from gpucr.cli.main import command\n"
        "try:\n    command.main(prog_name='gpucr')\n"
        "finally:\n    print(*[name for name in sys.modules if name.startswith('gpucr.operations')], file=sys.stderr)"
    )
    env = {**os.environ, "_GPUCR_COMPLETE": "bash_complete", "COMP_WORDS": "gpucr d", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "plain,dump" in done.stdout
    assert done.stderr.split() == []


def test_options_and_choices() -> None:
    assert complete("gpucr", "dump", "--per") == ["--persist"]
    assert complete("gpucr", "dump", "1", "--persist", "s") == ["sync"]
    assert complete("gpucr", "completion", "") == ["bash", "zsh", "fish"]
    assert complete("gpucr", "sim", "en") == ["env"]


def test_canaries() -> None:
    assert complete("gpucr", "doctor", "--probe", "--only", "pe") == ["peer_access"]


def test_error_codes() -> None:
    assert complete("gpucr", "explain", "gpucr-lock") == ["GPUCR-LOCK-TIMEOUT"]


def test_jobs_by_name(tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    assert command.run("run", "--no-isolate", "--name", "training", "true", env=state).returncode == 0
    assert complete("gpucr", "logs", "tra", env=state) == ["training"]
    assert complete("gpucr", "suspend", "other", env=state) == []


def test_processes_by_pid(counter: CounterFactory) -> None:
    pid = str(counter("--mib", "1").pid)
    assert pid in complete("gpucr", "suspend", pid[:1])
    assert complete("gpucr", "suspend", pid) == [pid]


def test_gpus() -> None:
    offered = complete("gpucr", "restore", "folder", "--gpu", "")
    assert offered[:2] == ["auto", "0"]
    assert any(value.startswith("GPU-") for value in offered)


def test_nothing_is_offered_and_nothing_said_where_nothing_can_be_known(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    nowhere = {"XDG_STATE_HOME": str(blocked)}
    assert complete("gpucr", "suspend", "", env=nowhere) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_of_its_shell(shell: str, tmp_path: Path) -> None:
    done = command.run("completion", shell)
    assert (done.returncode, f"_GPUCR_COMPLETE={shell}_complete" in done.stdout) == (0, True)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its syntax was not checked")
    script = tmp_path / "completion"
    script.write_text(done.stdout)
    checked = subprocess.run([shell, "-n", script], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_bash_completes_with_it(tmp_path: Path) -> None:
    program = tmp_path / "gpucr"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpucr "$@"\n')
    program.chmod(0o755)
    asked = 'eval "$(gpucr completion bash)"; COMP_WORDS=(gpucr res); COMP_CWORD=1; _gpucr_completion gpucr; '
    done = subprocess.run(
        ["bash", "-c", asked + 'printf "%s\\n" "${COMPREPLY[@]}"; complete -p gpucr'],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    *offered, registered = done.stdout.splitlines()
    assert offered == ["restore", "resume"]
    assert "_gpucr_completion" in registered
