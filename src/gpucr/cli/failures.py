"""How a failure is shown: what, why, what to do, and the code, on stderr; with --json also as an object on stdout."""

from __future__ import annotations

from typing import Any

import click

from gpucr.cli.output import JsonWanted, print_json, say
from gpucr.errors import CriuError, GpucrError, Interrupted, InvalidRequest

_IN_FIELDS_OF_THEIR_OWN = frozenset({"message", "hint", "code"})


def show(error: GpucrError, wanted: JsonWanted) -> None:
    """Show an error of gpucr. Where the command's object is on stdout already, no second one follows."""
    say(f"error: {error.message}")
    if error.why:
        say(f"why:   {error.why}")
    if isinstance(error, CriuError) and error.log_path:
        say(f"log:   {error.log_path}")
    if error.hint:
        say(f"hint:  {error.hint}")
    say(f"code:  {error.code}")
    if wanted.is_wanted and not wanted.is_printed:
        print_json("error", _fields(error))


def show_usage(error: click.ClickException, wanted: JsonWanted) -> None:
    """Show a command line that click could not take: the same, after click's own words."""
    error.show()
    say(f"code:  {InvalidRequest.code}")
    if wanted.is_wanted and not wanted.is_printed:
        print_json("error", _fields(InvalidRequest(error.format_message())))


def show_interruption(wanted: JsonWanted) -> None:
    """Show that Ctrl-C came where no operation was under way."""
    show(Interrupted("interrupted"), wanted)


def _fields(error: GpucrError) -> dict[str, Any]:
    return {
        "code": error.code,
        "exit_code": error.exit_code,
        "message": error.message,
        "why": error.why,
        "hint": error.hint,
        "data": {name: value for name, value in vars(error).items() if name not in _IN_FIELDS_OF_THEIR_OWN},
    }
