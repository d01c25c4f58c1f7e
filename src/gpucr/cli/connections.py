"""`gpucr connections`: connections that are kept for a restore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpucr.cli.columns import Column, fit, terminal_width
from gpucr.cli.options import json_option
from gpucr.cli.output import print_json, printable
from gpucr.operations.connections import close_kept, list_kept
from gpucr.quantities import counted

if TYPE_CHECKING:
    from gpucr.network.records import KeptRecord

_COLUMNS = (
    Column("NAME"),
    Column("SNAPSHOT", least=16),
    Column("SINCE", rank=1),
    Column("CONNECTIONS", rank=2, least=24, keeps_end=False),
)


@click.command("connections")
@click.option("--close", "to_close", metavar="NAME", help="Give these up: the other ends get a reset.")
@json_option
def command(*, to_close: str | None, as_json: bool) -> None:
    """List the connections that `gpucr dump --tcp keep` has kept on this machine, or give some up.

    Their packets are dropped until the snapshot is restored here or removed, or until --close with the NAME from the
    list, or the snapshot's. Needs root.

    \b
    Example:
      gpucr connections
      gpucr connections --close /var/snapshots/server
    """
    found = list_kept() if to_close is None else (close_kept(to_close),)
    if as_json:
        print_json("connections", {"closed": to_close is not None, "kept": [_fields(each) for each in found]})
    elif to_close is not None:
        click.echo(f"{counted(len(found[0].connections), 'connection')} of {printable(found[0].snapshot)} closed")
    else:
        rows = [(each.name, printable(each.snapshot), each.created, _text(each)) for each in found]
        click.echo("\n".join(fit(_COLUMNS, rows, terminal_width())) if rows else "no connections are kept")


def _text(record: KeptRecord) -> str:
    return ", ".join(map(str, record.connections))


def _fields(record: KeptRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "snapshot": record.snapshot,
        "created": record.created,
        "connections": list(record.connections),
    }
