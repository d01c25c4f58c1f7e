"""Every command of `gpucr`, sub-commands included."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from gpucr.cli import main


def _walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            yield from _walk(f"{name} {child}", found)


COMMANDS = dict(_walk("gpucr", main.command))


def unknown_options(name: str, rest: str) -> set[str]:
    """The options among what is typed after ``gpucr NAME`` that the command does not have."""
    command = COMMANDS[f"gpucr {name}"]
    if isinstance(command, click.Group):
        return set()
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    own = re.split(r" -- | [|;&>] |#", rest)[0]  # what follows belongs to another program
    return set(re.findall(r"(?<!\S)--?[a-z][\w-]*", own)) - known
