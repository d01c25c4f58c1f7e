"""`gpucr rm`: a snapshot out of a store."""

from __future__ import annotations

from pathlib import Path

import click

from gpucr.cli.keys import key_file_option, with_key
from gpucr.cli.ls import snapshot_fields
from gpucr.cli.options import complete_place, json_option, quiet_option
from gpucr.cli.output import print_json
from gpucr.operations.stores import remove_parts


@click.command("rm")
@click.argument("snapshot", metavar="STORE#NAME", shell_complete=complete_place)
@key_file_option
@json_option
@quiet_option
def command(*, snapshot: str, key_file: Path | None, as_json: bool, quiet: bool) -> None:
    """Remove a snapshot from its store. What only it needed is freed by `gpucr prune`.

    \b
    Example:
      gpucr rm /var/snapshots/store#before-lunch
    """
    removed = with_key(key_file, lambda key: remove_parts(snapshot, key=key))
    if as_json:
        print_json("rm", {"removed": [snapshot_fields(each) for each in removed]})
    if as_json or quiet:
        return
    for each in removed:
        click.echo(f"{each.label} removed")
