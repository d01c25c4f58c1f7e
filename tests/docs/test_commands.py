"""Commands, options, JSON fields, exit codes and environment variables are those of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest

from gpucr.cli import main
from gpucr.snapshot import manifest
from tests.command import run, run_json, run_json_before
from tests.counter import CounterFactory, wait_until
from tests.docs import commands, schemas
from tests.docs.command_tree import COMMANDS
from tests.docs.pages import (
    CODE,
    ROOT,
    SOURCES,
    error_classes,
    first_cells,
    of_command,
    page,
    section,
    without_fences,
)

_COMMANDS_PAGES = "\n".join(
    page(f"reference/{name}.md") for name in ("commands", "commands-unattended", "commands-snapshots")
)
_HEADINGS = sorted({" ".join(name.split()[:2]) for name in COMMANDS if name != "gpucr"})


@pytest.mark.parametrize("name", _HEADINGS)
def test_every_command_is_described_with_its_real_options(name: str) -> None:
    """The options themselves are in the help and on the site's page that is made of it (test_site.py)."""
    described = without_fences(of_command(_COMMANDS_PAGES, name))
    below = [each for each in COMMANDS if f"{each} ".startswith(f"{name} ")]
    assert {each for each in below if each != name and f"`{each}" not in described} == set()
    words = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", described))
    named = re.findall(r"`gpucr ([a-z]+)[^`]*`", described)  # with options of their own
    known = {each for each in COMMANDS if " ".join(each.split()[:2]) in {name, *(f"gpucr {other}" for other in named)}}
    options = {opt for each in known for p in COMMANDS[each].params for opt in (*p.opts, *p.secondary_opts)}
    assert words - options == set(), "described, but not there"


def test_the_list_of_commands_is_generated_from_their_help() -> None:
    text = commands.PAGE.read_text()
    assert text == commands.with_commands(text), "write it again: python -m tests.docs"


def test_every_option_has_a_help_text() -> None:
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} {parameter.opts}"


def test_every_help_fits_into_80_columns() -> None:
    """Examples are not wrapped."""
    helps = {
        name: each.get_help(click.Context(each, info_name=name, terminal_width=80)) for name, each in COMMANDS.items()
    }
    assert [(name, line) for name, text in helps.items() for line in text.splitlines() if len(line) > 80] == []


def test_every_command_has_a_help_with_an_example() -> None:
    for name, command in COMMANDS.items():
        if not isinstance(command, click.Group):
            assert "Example" in (command.help or ""), name


@pytest.mark.parametrize("name", ["ps", "state", "suspend", "resume"])
def test_the_fields_of_a_job_in_json(name: str, counter: CounterFactory) -> None:
    program = counter("--mib", "1", "--fork", "1")
    arguments = () if name == "ps" else (program.pid,)
    _require(name, run_json(name, *arguments))


def test_the_fields_of_sim_env_in_json() -> None:
    _require("sim.env", run_json("sim", "env"))


def test_the_fields_of_units_and_the_helper_in_json() -> None:
    _require("service.show", run_json("service", "show"))
    _require("helper.status", json.loads(run("helper", "status", "--json").stdout))


def test_the_fields_of_explain_in_json() -> None:
    _require("explain", run_json("explain"))
    (one,) = run_json("explain", "lock-timeout")["codes"]
    assert one["code"] == "GPUCR-LOCK-TIMEOUT"
    assert run_json_before("explain", "lock-timeout")["codes"] == [one]


def test_every_command_that_prints_data_prints_json() -> None:
    """The others run programs, print what these printed, or what a shell reads."""
    without = {name for name, each in COMMANDS.items() if not isinstance(each, click.Group) and not _has_json(each)}
    listening = ("helper listen", "hook run", "top")
    other = ("batch", "completion", "exec", "logs", "sim ask", "sim counter", "sim ranks", *listening)
    assert without == {f"gpucr {name}" for name in other}


def _has_json(command: click.Command) -> bool:
    return any("--json" in parameter.opts for parameter in command.params)


def test_the_fields_of_run_and_jobs_in_json(tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    _require("run", run_json_before("run", "--no-isolate", "--name", "long", "sleep", "1000", env=state))
    plan = run_json_before("run", "--explain", "true", env=state)
    _require("run.plan", plan)
    _require("jobs", run_json("jobs", "--all", env=state))
    _require("kill", run_json("kill", "long", env=state))


def test_the_fields_of_doctor_in_json(tmp_path: Path) -> None:
    done = run("doctor", "--probe", "--only", "plain", "--json", env={"XDG_STATE_HOME": str(tmp_path)})
    printed = json.loads(done.stdout)  # anything stands in the way on this machine
    _require("doctor", printed)


@pytest.mark.criu
def test_the_fields_of_criu_and_demo_in_json() -> None:
    _require("criu", run_json("criu", "--no-fetch"))
    _require("demo", run_json("demo", "--mib", "1"))


@pytest.mark.criu
def test_the_fields_of_dump_inspect_and_restore_in_json(counter: CounterFactory, tmp_path: Path) -> None:
    program, folder = counter("--mib", "1"), tmp_path / "snapshot"
    plan = run_json("dump", program.pid, "--to", folder, "--dry-run")
    _require("dump.plan", plan)
    _require("dump", run_json("dump", program.pid, "--to", folder))
    program.reap()
    _require("verify.rehearsal", run_json("verify", folder, "--rehearse"))
    inspected = run_json("inspect", folder)
    assert set(inspected["manifest"]) == set(manifest.Manifest.__struct_fields__)
    _require("inspect", inspected)
    _require("restore.plan", run_json("restore", folder, "--dry-run"))
    _require("restore", run_json("restore", folder))
    wait_until(lambda: program.alive, "the restored counter")
    _require("suspend.plan", run_json("suspend", program.pid, "--dry-run"))


@pytest.mark.criu
def test_the_fields_of_the_commands_on_stores_in_json(
    counter: CounterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, store, key = counter("--mib", "1"), tmp_path / "store", tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    monkeypatch.setenv("GPUCR_KEY_FILE", str(key))
    _require("store.init", run_json("store", "init", store, "--encrypt"))
    _require("store.keys", run_json("store", "keys", store))
    for name in ("a", "b"):
        dumped = run_json("dump", program.pid, "--to", f"{store}#{name}", "--leave-running")
        _require("dump", dumped)
    _require("ls", run_json("ls", store))
    _require("verify", run_json("verify", store))
    _require("diff", run_json("diff", f"{store}#a", f"{store}#b"))
    run_json("store", "init", tmp_path / "copy", "--encrypt")
    _require("copy", run_json("copy", store, tmp_path / "copy"))
    _require("prune", run_json("prune", store, "--keep-last", "1"))
    program.kill()
    _require("restore", run_json("restore", store))
    _require("rm", run_json("rm", f"{store}#b"))


def _require(kind: str, printed: dict[str, Any]) -> None:
    assert printed["schema"] == f"gpucr.{kind}"
    schemas.check(printed)


def test_exit_codes_agree_with_the_errors() -> None:
    codes = re.findall(r"^\| (\d+) \|", section(page("reference/common.md"), "Exit codes"), re.MULTILINE)
    assert {int(code) for code in codes} == {0} | {error.exit_code for error in error_classes()}
    assert {int(code) for code in re.findall(r"^  (\d+) ", main._EXIT_CODES, re.MULTILINE)} == set(map(int, codes))


def test_every_environment_variable_is_described() -> None:
    named = set(first_cells(section(page("reference/common.md"), "Environment variables")))
    read: set[str] = set()
    for file in [*SOURCES.rglob("*.py"), *(ROOT / "tests").glob("*.py")]:
        text = file.read_text()
        read |= set(re.findall(r'"(GPUCR_[A-Z_]+|XDG_[A-Z_]+)"', text))
        read |= set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', text))
    simulated = {name for name in read if name.startswith("GPUCR_SIM_")}
    of_pytest = {"PYTEST_XDIST_WORKER"}
    assert read - simulated - of_pytest == named - {"GPUCR_SIM_*", "PATH"}
    assert simulated <= set(CODE.findall(section(page("reference/simulator.md"), "Environment")))
