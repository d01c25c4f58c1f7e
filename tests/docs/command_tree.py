"""Every command of `gpucr`, sub-commands included."""

from __future__ import annotations

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
