"""`gpucr prune`: remove old snapshots and unneeded data from a store."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from gpucr.cli.durations import Duration
from gpucr.cli.keys import key_file_option, with_key
from gpucr.cli.ls import snapshot_fields
from gpucr.cli.options import as_one, complete_folder, json_option, keep_options, quiet_option
from gpucr.cli.output import Output, print_json
from gpucr.operations.stores import prune_store
from gpucr.quantities import counted, format_bytes
from gpucr.store.retention import PruneRules

if TYPE_CHECKING:
    from gpucr.store.prune import LaterSpace


@click.command("prune")
@click.argument("store", metavar="STORE", shell_complete=complete_folder)
@keep_options
@click.option(
    "--keep-within",
    "keep_within_s",
    type=Duration(),
    metavar="TIME",
    help="Keep snapshots younger than this: 12h, 7d, 2w.",
)
@click.option("--keep-weekly", type=click.IntRange(min=1), metavar="N", help="Keep the latest of each of N weeks.")
@click.option("--keep-monthly", type=click.IntRange(min=1), metavar="N", help="Keep the latest of each of N months.")
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="PATTERN",
    help="Apply the rules to snapshots with this name only (train-*) and keep all others. May be repeated.",
)
@click.option("--per-name", is_flag=True, help="Apply the rules to each name separately, and always keep its latest.")
@click.option(
    "--grace",
    "grace_s",
    type=Duration(),
    default="1d",
    show_default=True,
    metavar="TIME",
    help="How long unneeded data stays, for readers of a removed snapshot.",
)
@click.option(
    "--dead-after",
    "dead_after_s",
    type=Duration(),
    default="1h",
    show_default=True,
    metavar="TIME",
    help="A dump without a sign of life (one a minute) for this long will not be completed.",
)
@click.option("--repack", is_flag=True, help="Also rewrite packs that are less than half in use.")
@click.option("--dry-run", is_flag=True, help="Print what would be done and change nothing.")
@key_file_option
@json_option
@quiet_option
@as_one("rules", PruneRules)
@as_one("output", Output)
def command(
    *, store: str, rules: PruneRules, repack: bool, dry_run: bool, key_file: Path | None, output: Output
) -> None:
    """Remove snapshots that no rule keeps, and what dead dumps left behind. Dumps and restores may run meanwhile.

    A snapshot is kept if one of the --keep options says so; without any, all are. Rules that keep none are
    refused. Space comes back with a later prune: unneeded data is first retired, then deleted when no dump can rely on
    it and --grace has passed. The last lines say how much, and when.

    \b
    Example:
      gpucr prune /var/snapshots/store --keep-last 5 --keep-within 7d
      gpucr prune /var/snapshots/store --per-name --keep-last 3 --keep-daily 7
    """  # fmt: skip
    if repack:
        rules = structs.replace(rules, repack_below=0.5)
    report = with_key(key_file, lambda key: prune_store(store, rules, dry_run=dry_run, key=key))
    if output.as_json:
        listed = {"kept": report.kept, "removed": report.removed}
        numbers = {name: value for name, value in structs.asdict(report).items() if isinstance(value, int)}
        data = {name: [snapshot_fields(each) for each in found] for name, found in listed.items()}
        data |= {"later": [_later_fields(each) for each in report.later]}
        print_json("prune", {"dry_run": dry_run, **data, "dead_writers": list(report.dead_writers), **numbers})
    if not output.is_text:
        return
    would = "would be " if dry_run else ""
    for each in report.removed:
        click.echo(f"{each.label} {would}removed")
    for writer in report.dead_writers:
        click.echo(f"the dump {writer[:8]}, which died, {would}ended")
    click.echo(f"{len(report.kept)} kept; {format_bytes(report.deleted_bytes)} {would}deleted")
    for space in report.later:
        click.echo(_later_text(space))


def _later_fields(space: LaterSpace) -> dict[str, Any]:
    after = (
        None if space.after_s is None else datetime.fromtimestamp(space.after_s, timezone.utc).isoformat("T", "seconds")
    )
    return {"size_bytes": space.size_bytes, "after": after, "writers": space.writers}


def _later_text(space: LaterSpace) -> str:
    size = format_bytes(space.size_bytes)
    if space.after_s is None:
        return f"{size} stays as long as a snapshot needs some of it"
    when = f"{datetime.fromtimestamp(space.after_s, timezone.utc):%Y-%m-%d %H:%M:%SZ}"
    writing = f", once {counted(space.writers, 'writer')} at work now ended" if space.writers else ""
    return f"{size} is freed by a prune after {when}{writing}"
