"""The site's pages that are made of the program: all options, of what `--help` is made of, and all functions."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import click

import gpucr
from gpucr.cli import manual

_HEAD = """# Options

Every option of every command, as `--help` has it. [Commands](/docs/reference/commands.md) says the rest.
"""


_FUNCTIONS = """# Functions

Every function and class of [the Python API](/docs/reference/python-api.md), with what `help()` says of it.
"""
_CLASSES = ("Cancellation", "FrozenJob", "GpuMap", "JobSelector", "Process", "Secret", "Snapshot", "SnapshotInStore")
"""What has methods to call; the others are records."""


def write(folder: Path) -> None:
    """Write the pages into ``folder``, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "options.md").write_text(options(), encoding="utf-8")
    (folder / "functions.md").write_text(functions(), encoding="utf-8")


def functions() -> str:
    """The page of functions and classes, in Markdown: a section each, its docstring as it is."""
    found = [name for name in sorted(gpucr.__all__) if inspect.isfunction(getattr(gpucr, name))]
    parts = [_section_of(name, getattr(gpucr, name), "##") for name in found]
    for name in _CLASSES:
        parts += [_section_of(name, getattr(gpucr, name), "##"), *_members(name)]
    return "\n".join([_FUNCTIONS, *parts])


def _members(name: str) -> list[str]:
    public = {key: value for key, value in vars(getattr(gpucr, name)).items() if not key.startswith("_")}
    methods = {key: getattr(value, "__func__", value) for key, value in public.items()}
    return [
        _section_of(f"{name}.{key}", value.fget if isinstance(value, property) else value, "###")
        for key, value in methods.items()
        if inspect.isfunction(value) or isinstance(value, property)
    ]


def _section_of(name: str, called: Any, rank: str) -> str:
    signature = re.sub(r"<function .*? at 0x\w+>", "...", str(inspect.signature(called)))
    return "\n".join(
        [f"{rank} {name}", "", "```python", f"{name}{signature}", "```", "", "```text",
         inspect.getdoc(called) or "", "```", ""]
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
