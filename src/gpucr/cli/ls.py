"""`gpucr ls`: the snapshots of a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpucr.cli.columns import Column, fit, terminal_width
from gpucr.cli.keys import key_file_option, with_key
from gpucr.cli.options import complete_folder, json_option
from gpucr.cli.output import print_json, printable, say
from gpucr.errors import SnapshotError
from gpucr.quantities import format_bytes

if TYPE_CHECKING:
    from gpucr.store.stored_snapshot import StoredSnapshot

_COLUMNS = (
    Column("NAME", least=24),
    Column("ID"),
    Column("CREATED", rank=1),
    Column("HOST", rank=4, least=8),
    Column("SIZE", rank=2, is_number=True),
    Column("WRITTEN", rank=3, is_number=True),
)


@click.command("ls")
@click.argument("store", metavar="STORE", shell_complete=complete_folder)
@key_file_option
@json_option
def command(*, store: str, key_file: Path | None, as_json: bool) -> None:
    """List the snapshots of STORE, oldest first: name, id, time, machine, size, and what its dump wrote.

    \b
    Example:
      gpucr ls /var/snapshots/store
      gpucr ls s3://bucket/prefix --key-file /root/store.key
    """
    from gpucr.operations.stores import list_snapshots

    listing = with_key(key_file, lambda key: list_snapshots(store, key=key))
    if as_json:
        damaged = {each: [error.message] for each, error in listing.damaged.items()}
        print_json("ls", {"snapshots": [snapshot_fields(each) for each in listing.snapshots], "damaged": damaged})
    else:
        _print_table(listing.snapshots)
    for error in listing.damaged.values():
        say(printable(f"damaged: {error.message}"))
    if listing.damaged:
        raise SnapshotError(
            f"{len(listing.damaged)} of the snapshots cannot be read", path=store, hint="gpucr verify tells more"
        )


def snapshot_fields(snapshot: StoredSnapshot) -> dict[str, Any]:
    """A snapshot of a store as JSON takes it."""
    return {
        "id": snapshot.id,
        "name": snapshot.name,
        "created": snapshot.created,
        "host": snapshot.host,
        "size_bytes": snapshot.size_bytes,
        "counters": dict(snapshot.counters),
    }


def _print_table(found: tuple[StoredSnapshot, ...]) -> None:
    if not found:
        click.echo("no snapshots")
        return
    click.echo("\n".join(fit(_COLUMNS, [_row(each) for each in found], terminal_width())))


def _row(each: StoredSnapshot) -> tuple[str, ...]:
    written = each.counters.get("written_bytes")
    return (
        each.name or "-",
        each.id[:8],
        f"{each.created[:19].replace('T', ' ')}Z" if each.created.endswith("+00:00") else each.created,
        printable(each.host),
        format_bytes(each.size_bytes),
        format_bytes(written) if written is not None else "-",
    )
