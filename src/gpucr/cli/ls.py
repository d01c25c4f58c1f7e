"""`gpucr ls`: the snapshots of a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpucr.cli.columns import Column, fit, terminal_width
from gpucr.cli.keys import key_file_option, with_key
from gpucr.cli.options import complete_folder, json_option
from gpucr.cli.output import print_json, printable, say
from gpucr.errors import SnapshotError
from gpucr.operations.stores import list_snapshots
from gpucr.quantities import format_bytes
from gpucr.records import RecordError
from gpucr.snapshot.manifest import decode_brief

if TYPE_CHECKING:
    from gpucr.store.stored_snapshot import StoredSnapshot

_OPTIONAL = (Column("NODE"), Column("GPU", rank=5), Column("COMMAND", rank=6, least=12, keeps_end=False))
"""Shown if a snapshot has a value for it: all but damaged ones have a command."""
_COLUMNS = (
    Column("NAME", least=24),
    Column("ID"),
    _OPTIONAL[0],
    Column("CREATED", rank=1),
    Column("HOST", rank=4, least=8),
    Column("SIZE", rank=2, is_number=True),
    Column("WRITTEN", rank=3, is_number=True),
    *_OPTIONAL[1:],
)


@click.command("ls")
@click.argument("store", metavar="STORE", shell_complete=complete_folder)
@key_file_option
@json_option
def command(*, store: str, key_file: Path | None, as_json: bool) -> None:
    """List the snapshots of STORE, oldest first: name, id, time, machine, size, what its dump wrote, GPUs, command.

    \b
    Example:
      gpucr ls /var/snapshots/store
      gpucr ls s3://bucket/prefix --key-file /root/store.key
    """
    listing = with_key(key_file, lambda key: list_snapshots(store, key=key))
    if as_json:
        damaged = {each: [error.message] for each, error in listing.damaged.items()}
        print_json(
            "ls",
            {
                "snapshots": [snapshot_fields(each, is_whole=listing.is_whole(each)) for each in listing.snapshots],
                "damaged": damaged,
            },
        )
    else:
        _print_table(listing.snapshots, listing.is_whole)
    for error in listing.damaged.values():
        say(printable(f"damaged: {error.message}"))
    if listing.damaged:
        raise SnapshotError(
            f"{len(listing.damaged)} of the snapshots cannot be read", path=store, hint="gpucr verify tells more"
        )


def snapshot_fields(snapshot: StoredSnapshot, *, is_whole: bool = True) -> dict[str, Any]:
    """A snapshot of a store as JSON takes it. ``is_whole``: not part of an incomplete set."""
    return {
        "id": snapshot.id,
        "name": snapshot.name,
        "created": snapshot.created,
        "host": snapshot.host,
        "size_bytes": snapshot.size_bytes,
        **_manifest_fields(snapshot),
        "counters": dict(snapshot.counters),
        "part": snapshot.part,
        "complete": is_whole,
    }


def _manifest_fields(snapshot: StoredSnapshot) -> dict[str, Any]:
    """The manifest's job data; empty if it is not a job's."""
    try:
        brief = decode_brief(snapshot.manifest)
    except RecordError:
        return {"job": None, "command_line": [], "gpu_models": []}
    return {"job": brief.job, "command_line": list(brief.command_line), "gpu_models": list(brief.gpu_models)}


def _print_table(found: tuple[StoredSnapshot, ...], is_whole: Callable[[StoredSnapshot], bool]) -> None:
    if not found:
        click.echo("no snapshots")
        return
    rows = [_row(each, is_whole=is_whole(each)) for each in found]
    unused = {each for each in _OPTIONAL if all(row[_COLUMNS.index(each)] == "-" for row in rows)}
    columns = [column for column in _COLUMNS if column not in unused]
    used = [[cell for column, cell in zip(_COLUMNS, row, strict=True) if column not in unused] for row in rows]
    click.echo("\n".join(fit(columns, used, terminal_width())))


def _row(each: StoredSnapshot, *, is_whole: bool) -> tuple[str, ...]:
    written, fields = each.counters.get("written_bytes"), _manifest_fields(each)
    return (
        each.name or "-",
        each.id[:8],
        "-" if each.part is None else f"{each.part.node} of {each.part.node_count}{'' if is_whole else ', unfinished'}",
        f"{each.created[:19].replace('T', ' ')}Z" if each.created.endswith("+00:00") else each.created,
        printable(each.host),
        format_bytes(each.size_bytes),
        format_bytes(written) if written is not None else "-",
        printable(", ".join(fields["gpu_models"])) or "-",
        printable(" ".join(fields["command_line"])) or "-",
    )
