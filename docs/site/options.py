"""The site's page of all options, made of what `--help` is made of, as the manual pages are."""

from __future__ import annotations

from pathlib import Path

import click

from gpucr.cli import manual

_HEAD = """# Options

Every option of every command, as `--help` has it. [Commands](/docs/reference/commands.md) says the rest.
"""


def write(path: Path) -> None:
    """Write the page to ``path``; its folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page, in Markdown: a section a command."""
    return "\n".join([_HEAD, *(_section(context) for context in manual.contexts())])


def _section(context: click.Context) -> str:
    command = context.command
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    lines = [f"## {context.command_path}", "", f"`{usage}`", ""]
    options = [each for each in command.get_params(context) if isinstance(each, click.Option)]
    records = [record for option in options if (record := option.get_help_record(context))]
    lines += ["| option | meaning |", "| --- | --- |"]
    lines += [f"| `{_cell(names)}` | {_cell(text).replace('<', '&lt;')} |" for names, text in records]
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
