"""Manual pages, generated from the same source as `--help`: ``python3 -m gpucr.cli.manual DIR`` writes them into DIR.

One page per command, ``gpucr-dump.1``, in section 1. The format is man(7).
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from gpucr.cli.explain import pages as error_pages
from gpucr.cli.main import command as gpucr
from gpucr.errors import BrokenInstall
from gpucr.version import __version__

_VERBATIM = "\b"  # click's mark for a paragraph that keeps its lines
_EXAMPLE = re.compile(r"^Examples?\b.*:$")
_ENVIRONMENT = {
    "GPUCR_CRIU": "the CRIU to use, 4.1 or newer, 4.2 on Linux 6.16 and newer; never skipped for another one",
    "GPUCR_HELPER": "the socket of the privileged helper; off: it is not used",
    "GPUCR_INTERPOSE": "0: gpucr run does not load the interposer; 1: also where it finds no driver",
    "XDG_DATA_HOME": "a CRIU that was fetched and the interposer are below it (default ~/.local/share)",
    "XDG_STATE_HOME": "jobs, results of probes and logs of what failed are below it (default ~/.local/state)",
    "NO_COLOR": "no colours in progress",
}


def write_pages(folder: Path) -> list[Path]:
    """Write the page of every command into ``folder``, which is made if it is missing; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for context in contexts():
        path = folder / f"{_title(context)}.1"
        path.write_text(page(context), encoding="utf-8")
        written.append(path)
    return written


def contexts(parent: click.Context | None = None, name: str = "gpucr") -> Iterator[click.Context]:
    """click's context of every command and sub-command, as it is when the command is called; `gpucr` first."""
    command = gpucr if parent is None else _child(parent, name)
    context = click.Context(command, parent=parent, info_name=name, **command.context_settings)
    yield context
    for child in _names_of_children(context):
        yield from contexts(context, child)


def _names_of_children(context: click.Context) -> list[str]:
    return context.command.list_commands(context) if isinstance(context.command, click.Group) else []


def _child(context: click.Context, name: str) -> click.Command:
    found = context.command.get_command(context, name) if isinstance(context.command, click.Group) else None
    if found is None:
        raise BrokenInstall(f"the command {context.command_path} {name} is listed and not there")
    return found


def _title(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def page(context: click.Context) -> str:
    """The manual page of one command."""
    command = context.command
    body, example = _split_help(command.help or "")
    first, *rest = body
    lines = [
        f'.TH "{_title(context).upper()}" "1" "" "gpucr {__version__}" "gpucr manual"',
        ".SH NAME",
        f"{_text(_title(context))} \\- {_text(_summary(first))}",
        ".SH SYNOPSIS",
        f".B {_text(context.command_path)}",
        _text(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
    ]
    for paragraph in (first, *rest):
        lines += [".PP", *_paragraph(paragraph)]
    lines += _options(context)
    lines += _children(context)
    if example:
        lines += [".SH EXAMPLES", ".nf", *(_text(line) for line in example), ".fi"]
    lines += _closing(context)
    return "\n".join(lines) + "\n"


def _split_help(text: str) -> tuple[list[str], list[str]]:
    """The paragraphs of a help text, and the lines of its example."""
    paragraphs: list[str] = []
    example: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line.strip() != _VERBATIM]
        if lines and _EXAMPLE.match(lines[0].strip()):
            example += [line.removeprefix("  ") for line in lines[1:]]
        elif lines:
            paragraphs.append("\n".join(lines) if _VERBATIM not in paragraph else _VERBATIM + "\n".join(lines))
    return paragraphs, example


def _summary(paragraph: str) -> str:
    """The first sentence without its full stop, on one line."""
    sentence = re.split(r"(?<=\.)\s", " ".join(paragraph.strip(_VERBATIM).split()), maxsplit=1)[0]
    return sentence.rstrip(".")


def _paragraph(paragraph: str) -> list[str]:
    if paragraph.startswith(_VERBATIM):
        return [".nf", *(_text(line) for line in paragraph[1:].splitlines()), ".fi"]
    return [_text(" ".join(paragraph.split()))]


def _options(context: click.Context) -> list[str]:
    options = [each for each in context.command.get_params(context) if isinstance(each, click.Option)]
    lines = [".SH OPTIONS"]
    for names, text in filter(None, (option.get_help_record(context) for option in options)):
        lines += [".TP", f".B {_text(names)}", _text(" ".join(text.split()))]
    return lines


def _children(context: click.Context) -> list[str]:
    names = _names_of_children(context)
    lines = [".SH COMMANDS"] if names else []
    for name in names:
        summary = _summary(_split_help(_child(context, name).help or "")[0][0])
        lines += [".TP", f".BR {_text(_title(context))}\\-{_text(name)} (1)", _text(summary)]
    return lines


def _closing(context: click.Context) -> list[str]:
    if context.parent is not None:
        see = f".BR {_text(_title(context.parent))} (1)"
        return [".SH SEE ALSO", see]
    lines = [".SH EXIT STATUS", *_paragraph(_VERBATIM + _exit_codes()), ".SH ENVIRONMENT"]
    for name, text in _ENVIRONMENT.items():
        lines += [".TP", f".B {name}", _text(text)]
    lines += [
        ".SH ERRORS",
        "Each error has a code.",
        ".BR gpucr\\-explain (1)",
        "prints its description. The codes are",
    ]
    return [*lines, _text(", ".join(error_pages())) + "."]


def _exit_codes() -> str:
    lines = (gpucr.epilog or "").strip(_VERBATIM).strip().splitlines()
    return "\n".join(line.removeprefix("  ") for line in lines[1:])


def _text(text: str) -> str:
    """Text for roff: its backslashes and hyphens mean themselves, and no line begins with a control character."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped


if __name__ == "__main__":
    for written_page in write_pages(Path(sys.argv[1])):
        click.echo(written_page)
