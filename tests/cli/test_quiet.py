"""`--quiet`: cron sends a mail for every line that a command prints, and only errors are worth one."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest

from tests.command import run, run_json
from tests.counter import CounterFactory
from tests.docs.command_tree import COMMANDS


def _prints_nothing(*arguments: object) -> None:
    done = run(*arguments, "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_suspend_and_resume(counter: CounterFactory) -> None:
    job = counter("--mib", "1")
    _prints_nothing("suspend", job.pid)
    _prints_nothing("resume", job.pid)
    _prints_nothing("move", job.pid, "--gpu", "1")
    assert job.ask() == 101
    assert run_json("suspend", job.pid, "-q")["processes"][0]["state"] == "checkpointed"


def test_an_error_is_printed() -> None:
    done = run("suspend", "no-such-job", "-q")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")


@pytest.mark.criu
def test_dump_and_restore(counter: CounterFactory, tmp_path: Path) -> None:
    job, folder = counter("--mib", "1"), tmp_path / "snapshot"
    _prints_nothing("dump", job.pid, "--to", folder, "--dry-run")
    _prints_nothing("dump", job.pid, "--to", folder)
    job.reap()
    _prints_nothing("verify", folder)
    _prints_nothing("restore", folder)
    assert job.ask() == 101


@pytest.mark.criu
def test_stores(counter: CounterFactory, tmp_path: Path) -> None:
    job, store, other = counter("--mib", "1"), tmp_path / "store", tmp_path / "other"
    for path in (store, other):
        run_json("store", "init", path)
    _prints_nothing("dump", job.pid, "--to", f"{store}#a", "--leave-running")
    _prints_nothing("verify", store, "--deep")
    _prints_nothing("copy", store, other)
    _prints_nothing("rm", f"{other}#a")
    _prints_nothing("prune", other)
    done = run("verify", store, "-q", "--json")
    assert (json.loads(done.stdout)["damaged"], done.stderr) == ({}, "")


def test_every_command_for_cron_has_quiet() -> None:
    quiet = {name for name, command in COMMANDS.items() if not isinstance(command, click.Group) and _has_quiet(command)}
    names = (
        "suspend",
        "resume",
        "move",
        "dump",
        "restore",
        "verify",
        "copy",
        "rm",
        "prune",
        "doctor",
        "nodes dump",
        "nodes restore",
    )
    assert quiet == {f"gpucr {name}" for name in names}


def _has_quiet(command: click.Command) -> bool:
    return any("--quiet" in parameter.opts for parameter in command.params)
