"""The list of commands, made of their help: ``python -m tests.docs`` writes it."""

from __future__ import annotations

import click

from tests.docs.command_tree import COMMANDS
from tests.docs.pages import DOCS

PAGE = DOCS / "reference" / "commands.md"
_BEGIN, _END = "<!-- made by tests/docs/commands.py -->\n", "<!-- end -->"


def with_commands(text: str) -> str:
    """The page with a new list between its marks: a row a command, with the names of its sub-commands."""
    before, found, rest = text.partition(_BEGIN)
    assert found, "the page has no mark for commands"
    rows = "".join(
        f"| `{name}` | {_said(name, command)} |\n" for name, command in COMMANDS.items() if name.count(" ") == 1
    )
    return f"{before}{_BEGIN}| command | does |\n| --- | --- |\n{rows}{_END}{rest.partition(_END)[2]}"


def _said(name: str, command: click.Command) -> str:
    said = command.get_short_help_str(200).rstrip(".")
    below = [f"`{each}`" for each in COMMANDS if each.startswith(f"{name} ")]
    return f"{said}: {', '.join(below)}" if below else said
