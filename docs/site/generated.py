"""The site's pages that are made of the program: all options, of what `--help` is made of, and all functions."""

from __future__ import annotations

import inspect
from pathlib import Path

import click

import gpucr
from gpucr.cli import manual

_HEAD = """# Options

Every option of every command, as `--help` has it. [Commands](/docs/reference/commands.md) says the rest.
"""


_FUNCTIONS = """# Functions

Every function of [the Python API](/docs/reference/python-api.md), with what `help()` says of it.
"""


def write(folder: Path) -> None:
    """Write the pages into ``folder``, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "options.md").write_text(options(), encoding="utf-8")
    (folder / "functions.md").write_text(functions(), encoding="utf-8")


def functions() -> str:
    """The page of functions, in Markdown: a section a function, its docstring as it is."""
    found = [name for name in sorted(gpucr.__all__) if inspect.isfunction(getattr(gpucr, name))]
    return "\n".join([_FUNCTIONS, *(_function(name) for name in found)])


def _function(name: str) -> str:
    function = getattr(gpucr, name)
    return "\n".join(
        [f"## {name}", "", "```python", f"{name}{inspect.signature(function)}", "```", "", "```text",
         inspect.getdoc(function) or "", "```", ""]
    )  # fmt: skip


def options() -> str:
    """The page of options, in Markdown: a section a command."""
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
