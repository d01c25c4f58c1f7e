"""`gpucr copy`: snapshots from one store to another."""

from __future__ import annotations

from pathlib import Path

import click

from gpucr.cli.keys import key_file_option, read_key_file, with_key
from gpucr.cli.ls import snapshot_fields
from gpucr.cli.options import complete_folder, complete_place, json_option, quiet_option
from gpucr.cli.output import print_json
from gpucr.cli.progress import progress_printer
from gpucr.operations.stores import copy_snapshots


@click.command("copy")
@click.argument("source", metavar="STORE[#NAME]", shell_complete=complete_place)
@click.argument("target", metavar="STORE", shell_complete=complete_folder)
@key_file_option
@click.option(
    "--to-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The key of the second store, if it differs.",
)
@click.option("--from-plain", is_flag=True, help="The first store is not encrypted, but the second one is.")
@click.option("--to-plain", is_flag=True, help="The second store is not encrypted, but the first one is.")
@click.option("--trust-store", is_flag=True, help="Do not read and check what the second store has already.")
@json_option
@quiet_option
def command(
    *,
    source: str,
    target: str,
    key_file: Path | None,
    to_key_file: Path | None,
    from_plain: bool,
    to_plain: bool,
    trust_store: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Copy a snapshot, or all of a store, to another store: only what is missing there.

    What is there already is read and checked, and copied again if damaged. An interrupted copy continues
    when the command runs again.

    \b
    Example:
      gpucr copy /var/snapshots/store#nightly s3://bucket/prefix
      gpucr copy s3://bucket/prefix /var/snapshots/b --to-key-file /root/b.key
    """  # fmt: skip
    listener = progress_printer(quiet=quiet or as_json)
    to_key = read_key_file(to_key_file) if to_key_file is not None else None
    copied = with_key(
        key_file,
        lambda key: copy_snapshots(
            source,
            target,
            key=None if from_plain else key,
            target_key=to_key if to_key is not None or to_plain else key,
            trust_store=trust_store,
            on_progress=listener,
        ),
    )
    if as_json:
        pairs = [{"source": snapshot_fields(each.source), "target": snapshot_fields(each.target)} for each in copied]
        print_json("copy", {"copies": pairs})
    if as_json or quiet:
        return
    for each in copied:
        click.echo(f"{each.source.label} is {each.target.label} in {target}")
