"""What the commands of supervisors and of forwarders say alike, and the option that both have."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gpucr.cli.output import print_json, printable, say

if TYPE_CHECKING:
    from gpucr.jobs.sidecar import SidecarFolder
    from gpucr.jobs.sidecar_process import SidecarStarted

on_event_option = click.option(
    "--on-event", metavar="CMD", help="Run CMD for every event, given as JSON on its stdin. No shell."
)


def words_of(text: str) -> tuple[str, ...]:
    """A command of an option, as a shell splits it. Raises UsageError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as e:
        raise click.UsageError(f"{text!r} is no command: {e}") from e


def print_started(
    folder: SidecarFolder[Any, Any], pid: int, json_name: str, *, listen: Sequence[str] | None = None, as_json: bool
) -> None:
    """Say that a job's sidecar is at work."""
    if as_json:
        more = {} if listen is None else {"listen": list(listen)}
        fields = {"name": folder.name, f"{folder.WORD}_pid": pid, **more, "events": str(folder.events_path)}
        print_json(json_name, fields)
        return
    click.echo(f"{'name':{len(folder.WORD)}}  {folder.name}")
    click.echo(f"{folder.WORD}  {pid}")
    if listen is not None:
        click.echo(f"{'listens':{len(folder.WORD)}}  {printable(', '.join(listen))}")
    click.echo(f"{'events':{len(folder.WORD)}}  {folder.events_path}")


def print_missing(
    found: Sequence[SidecarStarted], kind: type[SidecarFolder[Any, Any]], json_name: str, *, as_json: bool
) -> None:
    """Say which sidecars were missing and have been started. Exits with 1 if one could not be started."""
    if as_json:
        jobs = [{"name": each.name, f"{kind.WORD}_pid": each.pid, "problem": each.problem} for each in found]
        print_json(json_name, {"jobs": jobs})
    for each in found:
        if each.problem is not None:
            say(f"error: {each.name}: {each.problem}")
        elif not as_json:
            click.echo(f"{each.name} is {kind.SERVED} again ({kind.WORD} {each.pid})")
    if not found and not as_json:
        click.echo(f"every job that is {kind.SERVED} has its {kind.WORD}")
    if any(each.problem is not None for each in found):
        raise SystemExit(1)
