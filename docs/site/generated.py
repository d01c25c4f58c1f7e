"""The site's pages that are made of the program: all options, of what `--help` is made of, functions and records."""

from __future__ import annotations

import enum
import inspect
import re
from pathlib import Path
from typing import Any

import click
import findings

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

_RECORDS = """# Records

What the functions of [the Python API](/docs/reference/python-api.md) take and return: members with their types, and
the text of `help()`. Type aliases are at the end. All records are frozen. Sizes are bytes, times seconds.
"""


def write(folder: Path) -> None:
    """Write the pages into ``folder``, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "options.md").write_text(options(), encoding="utf-8")
    (folder / "functions.md").write_text(functions(), encoding="utf-8")
    (folder / "records.md").write_text(records(), encoding="utf-8")
    (folder / "findings.md").write_text(findings.page(), encoding="utf-8")


def functions() -> str:
    """The page of functions and classes, in Markdown: a section each, its docstring as it is."""
    found = [name for name in sorted(gpucr.__all__) if inspect.isfunction(getattr(gpucr, name))]
    parts = [_section_of(name, getattr(gpucr, name), "##") for name in found]
    for name in _CLASSES:
        parts += [_section_of(name, getattr(gpucr, name), "##"), *_members(name)]
    return "\n".join([_FUNCTIONS, *parts])


def records() -> str:
    """The page of records and enums, in Markdown: a section each, with its members."""
    values = {name: getattr(gpucr, name) for name in sorted(gpucr.__all__) if name[0] != "_"}
    found = [_record(name, value) for name, value in values.items() if _is_record(value)]
    types = {
        name: value for name, value in values.items() if not inspect.isclass(value) and not inspect.isroutine(value)
    }
    found += [f"## {name}\n\n```python\n{str(value).replace('typing.', '')}\n```\n" for name, value in types.items()]
    return "\n".join([_RECORDS, *found])


def _is_record(value: Any) -> bool:
    return inspect.isclass(value) and not issubclass(value, BaseException) and value.__name__ not in _CLASSES


def _record(name: str, record: Any) -> str:
    if issubclass(record, enum.Enum):
        members = [each.name for each in record]
    else:
        members = [f"{key}: {kind}" for key, kind in inspect.get_annotations(record).items() if key[0] != "_"]
        for key, value in vars(record).items():
            if isinstance(value, property) and key[0] != "_":
                members.append(f"{key}: {inspect.signature(value.fget).return_annotation}  # {_first_line(value)}")
    parts = [f"## {name}", "", "```text", inspect.getdoc(record) or "", "```", "", "```python", *members, "```", ""]
    return "\n".join(parts)


def _first_line(value: Any) -> str:
    return (inspect.getdoc(value) or "").partition("\n")[0]


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
