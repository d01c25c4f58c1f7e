"""Help texts have examples that work, and the manual pages say what the help says."""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from gpucr.cli import manual
from tests.docs.command_tree import COMMANDS

CONTEXTS = {context.command_path: context for context in manual.contexts()}
_EXAMPLES = re.compile(r"^Examples?\b.*:\n((?:  .*\n?)+)", re.MULTILINE)
_CALL = re.compile(r"(?:^|\$\(|\(|; |&& )(?:sudo )?gpucr ((?:[^#|&>;)]|(?<=\S)#)*)")


def _help(name: str) -> str:
    return inspect.cleandoc(COMMANDS[name].help or "")


def _examples(name: str) -> list[str]:
    return [line.strip() for block in _EXAMPLES.findall(_help(name)) for line in block.splitlines()]


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "gpucr"])
def test_every_command_has_an_example_of_itself(name: str) -> None:
    assert any(name in line for line in _examples(name))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_can_be_parsed(name: str) -> None:
    """Each is parsed as it stands, down to its last sub-command. Nothing is run."""
    for line in _examples(name):
        for words in _CALL.findall(line):
            context = CONTEXTS["gpucr"]
            rest = shlex.split(words.replace("$!", "4711"))
            while isinstance(context.command, click.Group):
                context = CONTEXTS[f"{context.command_path} {rest.pop(0)}"]
            context.command.make_context(context.info_name, rest, parent=context.parent)


def test_every_command_has_a_page() -> None:
    assert list(CONTEXTS) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_contains_the_help(name: str) -> None:
    context = CONTEXTS[name]
    shown = _plain(manual.page(context))
    for parameter in context.command.get_params(context):
        if isinstance(parameter, click.Option):
            assert all(option in shown for option in parameter.opts), parameter
    for line in _examples(name):
        assert line in shown
    words = " ".join(_help(name).replace("\b", "").split())
    assert words.split(". ")[0].rstrip(".") in " ".join(shown.split())


def _plain(page: str) -> str:
    """The text of a page: what roff's escapes stand for."""
    return page.replace("\\&", "").replace("\\-", "-").replace("\\e", "\\")


def test_no_line_of_text_becomes_a_roff_request() -> None:
    known = {"TH", "SH", "PP", "TP", "B", "BR", "nf", "fi"}
    for context in CONTEXTS.values():
        requests = re.findall(r"^[.'](\S*)", manual.page(context), re.MULTILINE)
        assert set(requests) <= known, context.command_path
    assert manual._text(".hidden -x \\ 'y'") == "\\&.hidden \\-x \\e 'y'"


def test_the_formatter_gives_no_warnings(tmp_path: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    pages = manual.write_pages(tmp_path)
    done = subprocess.run(
        ["groff", "-man", "-Kutf8", "-Tutf8", "-ww", "-z", *pages], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_main_page_lists_exit_codes_and_error_codes() -> None:
    shown = _plain(manual.page(CONTEXTS["gpucr"]))
    assert "\n10   failed, and the job could not be brought back to how it was\n" in shown
    assert "GPUCR-LOCK-TIMEOUT" in shown
