"""What a shell is offered when it completes a command line of gpucr."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gpucr.cli.options import JobTarget
from gpucr.store.local import LocalBackend
from tests import command
from tests.counter import CounterFactory
from tests.docs.command_tree import COMMANDS
from tests.store import dumps
from tests.terminal import Terminal

OF_ENDED_JOBS = {f"gpucr {name}" for name in ("jobs", "logs", "wait", "on-demand", "supervise")}
"""The commands that have a use for a job which does not run."""


def complete(*words: str, env: dict[str, str] | None = None) -> list[str]:
    """The values that are offered for the last word."""
    return [value for _kind, value in offered(*words, env=env)]


def offered(*words: str, env: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """The values that are offered for the last word, each with its kind: ``plain``, or what the shell completes."""
    asked = {"_GPUCR_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = command.run(env={**asked, **(env or {})})
    assert done.stderr == ""
    found = [line.partition(",") for line in done.stdout.splitlines() if line]
    return [(kind, value) for kind, _, value in found]


def test_commands() -> None:
    assert complete("gpucr", "sus") == ["suspend"]
    assert set(complete("gpucr", "")) == {name.removeprefix("gpucr ") for name in COMMANDS if name.count(" ") == 1}


def test_commands_are_completed_without_loading_them() -> None:
    code = (
        "import sys, os; from gpucr.cli.main import command\n"
        "try:\n    command.main(prog_name='gpucr')\n"
        "finally:\n    print(*[name for name in sys.modules if name.startswith('gpucr.')], file=sys.stderr)"
    )
    env = {**os.environ, "_GPUCR_COMPLETE": "bash_complete", "COMP_WORDS": "gpucr d", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "plain,dump" in done.stdout
    loaded = done.stderr.split()
    assert "gpucr.cli.main" in loaded
    rooms = {name.split(".")[1] for name in loaded}
    assert not rooms & {"operations", "snapshot", "store", "jobs", "criu", "gang", "driver", "diagnosis"}


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
    for name, *program in (("training", "true"), ("trial", "sleep", "100")):
        assert command.run("run", "--no-isolate", "--name", name, *program, env=state).returncode == 0
    assert command.run("wait", "training", env=state).returncode == 0
    assert complete("gpucr", "logs", "tr", env=state) == ["training", "trial"]
    assert complete("gpucr", "suspend", "other", env=state) == []
    for name, each in COMMANDS.items():
        for parameter in each.params:
            if isinstance(parameter.type, JobTarget):
                found = complete(
                    *name.split(), *([parameter.opts[0]] if parameter.opts[0].startswith("-") else []), "tr", env=state
                )
                assert found == (["training", "trial"] if name in OF_ENDED_JOBS else ["trial"]), name
    assert command.run("kill", "trial", env=state).returncode == 0


def test_processes_by_pid(counter: CounterFactory) -> None:
    pid = str(counter("--mib", "1").pid)
    assert pid in complete("gpucr", "suspend", pid[:1])
    assert complete("gpucr", "suspend", pid) == [pid]


def test_gpus() -> None:
    offered = complete("gpucr", "restore", "folder", "--gpu", "")
    assert offered[:2] == ["auto", "0"]
    assert any(value.startswith("GPU-") for value in offered)


@pytest.mark.parametrize(
    "words",
    ["restore", "inspect", "verify", "rm", "ls", "prune", "copy", "copy a", "diff", "diff a", "store init",
     "store keys", "dump 1 --to", "doctor --to", "run --cwd", "demo --keep", "hook status --config-dir",
     "sim env --state-dir", "dump 1 --runtime-root"],
)  # fmt: skip
def test_folders(words: str) -> None:
    assert offered("gpucr", *words.split(), "/va") == [("dir", "/va")]


@pytest.mark.parametrize(
    "words",
    ["run", "run --log", "exec job", "ls store --key-file", "store keys s --add-key-file", "copy --to-key-file"],
)
def test_files(words: str) -> None:
    assert offered("gpucr", *words.split(), "/etc/pa") == [("file", "/etc/pa")]


def test_every_path_is_completed() -> None:
    """Every option or argument whose name suggests a path is completed as one."""
    names = {"DIR", "FILE", "STORE", "STORE#NAME", "DIR|STORE[#NAME]", "STORE[#NAME]|DIR", "STORE[#NAME]"}
    for name, each in COMMANDS.items():
        for parameter in each.params:
            if parameter.metavar in names:
                found = parameter.shell_complete(click.Context(each), "/va")
                assert [item.type for item in found] in (["dir"], ["file"]), (name, parameter.name)


def test_snapshots_of_a_store(tmp_path: Path) -> None:
    store, plain = tmp_path / "store", tmp_path / "plain"
    store.mkdir()
    opened = dumps.new_store(LocalBackend(store))
    for name in ("monday", "tuesday"):
        dumps.dump(opened, {"images/a": dumps.piece(1)}, name)
    assert complete("gpucr", "restore", f"{store}#") == [f"{store}#latest", f"{store}#tuesday", f"{store}#monday"]
    assert complete("gpucr", "restore", f"{store}#mo") == [f"{store}#monday"]
    assert complete("gpucr", "restore", f"{plain}#x") == []
    assert complete("gpucr", "restore", "s3://bucket/pre") == []


def test_bash_completes_paths(tmp_path: Path) -> None:
    program, folder = tmp_path / "gpucr", tmp_path / "snapshots-of-mine"
    folder.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpucr "$@"\n')
    program.chmod(0o755)
    bash = Terminal(["bash", "--norc", "--noprofile", "-i"], columns=200)
    try:
        bash.press(f'PS1="> "; PATH={tmp_path}:$PATH; eval "$(gpucr completion bash)"; echo rea"dy"\n')
        bash.wait_for("ready")
        for words in ("restore", "dump 1 --to"):
            bash.press(f"gpucr {words} {tmp_path}/snap\t")
            bash.wait_for(f"gpucr {words} {folder}/")
            bash.press("\x15")
    finally:
        bash.close()


def test_without_information_completion_is_empty_and_silent(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    nowhere = {"XDG_STATE_HOME": str(blocked)}
    assert complete("gpucr", "suspend", "", env=nowhere) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_valid_in_its_shell(shell: str, tmp_path: Path) -> None:
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
