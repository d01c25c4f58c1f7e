"""A mistyped command, option or value: the error says what is wrong, and what may have been meant."""

from __future__ import annotations

import click
import pytest

from gpucr.cli.explain import _for_terminal
from tests.command import run
from tests.docs.command_tree import COMMANDS


@pytest.mark.parametrize(
    ("typed", "error", "hint"),
    [
        ("suspnd", "there is no command 'suspnd'", "did you mean suspend?"),
        ("checkpoint", "there is no command 'checkpoint'", "did you mean suspend or dump?"),
        ("list", "there is no command 'list'", "did you mean jobs or ps or ls?"),
        ("zzzzz", "there is no command 'zzzzz'", "`gpucr --help` shows how to use it"),
        ("help", "there is no command 'help'", "`gpucr --help`"),
        ("help dump", "there is no command 'help'", "`gpucr dump --help`"),
        ("version", "there is no command 'version'", "`gpucr --version`"),
        ("store int", "there is no command 'int'", "did you mean init?"),
        ("hook instal", "there is no command 'instal'", "did you mean install or uninstall?"),
        ("sim countr", "there is no command 'countr'", "did you mean counter?"),
        ("store delete", "there is no command 'delete'", "`gpucr store --help` shows how to use it"),
        ("dump 1 --too x", "there is no option --too", "did you mean --tcp or --to?"),
        ("--json ps", "there is no option --json", "options follow the command: gpucr COMMAND --json"),
        ("dump 1", "--to is missing", "`gpucr dump --help` shows how to use it"),
        ("restore", "DIR|STORE[#NAME] is missing", "`gpucr restore --help` shows how to use it"),
        ("run", "CMD... is missing", "`gpucr run --help` shows how to use it"),
        ("completion", "SHELL is missing: one of bash, zsh, fish", "`gpucr completion --help` shows how to use it"),
        ("wait a b", "too many arguments: b", "`gpucr wait --help` shows how to use it"),
        ("logs a -n x", "--lines: 'x' is not a whole number", "`gpucr logs --help` shows how to use it"),
        (
            "sim ranks 1 --status-dir d --gpu-ms x",
            "--gpu-ms: 'x' is not a number",
            "`gpucr sim ranks --help` shows how to use it",
        ),
        ("top --interval 0", "--interval: '0' is not 0.1s or more", "`gpucr top --help` shows how to use it"),
        ("logs a -n -1", "--lines: -1 is not in the range x>=0", "`gpucr logs --help` shows how to use it"),
        (
            "restore x --tcp no",
            "--tcp: 'no' is not one of 'close', 'keep'",
            "`gpucr restore --help` shows how to use it",
        ),
        ("doctor --only plain", "--only needs --probe", "`gpucr doctor --help` shows how to use it"),
    ],
)
def test_a_usage_error_has_the_shape_of_all_errors(typed: str, error: str, hint: str) -> None:
    done = run(*typed.split())
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: {error}", f"hint:  {hint}", "code:  GPUCR-BAD-REQUEST"]


@pytest.mark.parametrize("group", [(), ("store",), ("nodes",), ("sim",)])
def test_a_group_without_a_command_shows_its_help_alone(group: tuple[str, ...]) -> None:
    done, asked = run(*group), run(*group, "--help")
    assert (done.returncode, asked.returncode) == (2, 0)
    assert done.stderr.strip() == asked.stdout.strip()


def test_no_group_cuts_what_its_commands_do() -> None:
    for group in ("helper", "hook", "nodes", "service", "sim", "store"):
        listed = run(group, "--help").stdout.partition("Commands:")[2]
        assert listed, group
        assert "..." not in listed


@pytest.mark.parametrize("spec", ["foo", "4x80GB", "2x", "", "17x16GiB", "0x16GiB", "16GiB,", "0GiB"])
def test_gpus_that_the_simulator_would_refuse_later(spec: str) -> None:
    done = run("sim", "env", "--gpus", spec)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --gpus: ")


@pytest.mark.parametrize("spec", ["16GiB", "2x16GiB,80GiB", "16x1MiB", "1073741824"])
def test_gpus_that_the_simulator_takes(spec: str) -> None:
    assert run("sim", "env", "--gpus", spec, "--json").returncode == 0


def test_a_word_of_a_code_finds_those_that_have_it() -> None:
    assert "GPUCR-LOCK-TIMEOUT" in run("explain", "lock").stderr
    assert "GPUCR-TIMEOUT" in run("explain", "timeuot").stderr
    assert "`gpucr explain` lists all codes" in run("explain", "zzzzz").stderr


def test_a_page_about_a_code_fits_the_terminal() -> None:
    page = "One **bold** word and enough others to fill a line of some length.\n\nSecond paragraph,\nbroken."
    shown = _for_terminal(page, 30)
    assert max(map(len, shown.splitlines())) <= 30
    assert shown.split("\n\n")[1] == "Second paragraph, broken."
    assert "*" not in shown
    assert max(map(len, _for_terminal("word " * 100, 500).splitlines())) <= 100
    assert _for_terminal(page, None) == page


def test_every_time_is_in_seconds_without_a_unit() -> None:
    found = 0
    for name, each in COMMANDS.items():
        for parameter in each.params:
            if isinstance(parameter, click.Option) and (
                "TIME" in str(parameter.metavar) or str(parameter.name).endswith("_s")
            ):
                assert parameter.type.convert("15", parameter, None) == 15.0, (name, parameter.opts)
                assert parameter.type.convert("1.5m", parameter, None) == 90.0, (name, parameter.opts)
                with pytest.raises(click.UsageError, match="is not a time: write 90 or 90s, 10m"):
                    parameter.type.convert("15y", parameter, None)
                found += 1
    assert found > 20
