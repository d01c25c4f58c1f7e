"""`gpucr diff`: what differs between two snapshots of a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpucr.cli.columns import Column, fit, terminal_width
from gpucr.cli.keys import key_file_option, with_key
from gpucr.cli.options import complete_place, json_option, verbose_option
from gpucr.cli.output import print_json, printable
from gpucr.quantities import format_bytes
from gpucr.snapshot.store_diff import diff_snapshots

if TYPE_CHECKING:
    from gpucr.snapshot.store_diff import Difference

_COLUMNS = (
    Column("PID", rank=1, is_number=True),
    Column("NAME", least=24),
    Column("WHAT", rank=2),
    Column("CHANGED", is_number=True),
    Column("OF", is_number=True),
)
_KINDS = {"device": "device memory", "memory": "host memory", "file": "file"}


@click.command("diff")
@click.argument("before", metavar="STORE#A", shell_complete=complete_place)
@click.argument("after", metavar="STORE#B", shell_complete=complete_place)
@key_file_option
@json_option
@verbose_option
def command(*, before: str, after: str, key_file: Path | None, as_json: bool, verbose: bool) -> None:
    """Show what differs between two snapshots of one store: by process and memory, and by file. No memory is read.

    With -v also where: ranges of addresses, or of bytes in files, as fine as pieces (2 MiB).

    \b
    Example:
      gpucr diff /var/snapshots/store#monday /var/snapshots/store#tuesday
    """
    found = with_key(key_file, lambda key: diff_snapshots(before, after, key=key))
    if as_json:
        print_json("diff", {"differences": found})
        return
    if not found:
        click.echo("no difference")
        return
    heading, *lines = fit(_COLUMNS, [_row(each) for each in found], terminal_width())
    click.echo(heading)
    for line, each in zip(lines, found, strict=True):
        click.echo(line)
        for start, end in each.ranges if verbose else ():
            click.echo(f"          {start:#x} to {end:#x}")


def _row(each: Difference) -> tuple[str, ...]:
    return (
        str(each.pid) if each.pid is not None else "-",
        printable(each.name),
        _KINDS[each.kind],
        format_bytes(each.changed_bytes),
        "gone" if each.size_after_bytes is None else format_bytes(each.size_after_bytes),
    )
