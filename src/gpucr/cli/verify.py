"""`gpucr verify`: whether snapshots can be read, or with a rehearsal, whether one comes back."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import click

from gpucr.cli.durations import Duration
from gpucr.cli.keys import key_file_option, with_key
from gpucr.cli.options import Percent, complete_place, json_option, quiet_option, timeout_option
from gpucr.cli.output import print_json, printable, say
from gpucr.cli.places import open_place
from gpucr.cli.progress import progress_printer
from gpucr.cli.reports import print_phases, rehearsal_fields, rehearsal_text, say_warnings, snapshot_text
from gpucr.errors import SnapshotDamaged, StoreDamaged
from gpucr.operations.rehearse import rehearse
from gpucr.operations.stores import verify_snapshots
from gpucr.quantities import format_bytes
from gpucr.snapshot.location import is_store


@click.command("verify")
@click.argument("snapshot", metavar="STORE[#NAME]|DIR", shell_complete=complete_place)
@click.option("--deep", is_flag=True, help="Read all data instead of only checking that it exists.")
@click.option(
    "--older-than",
    "older_than_s",
    type=Duration(),
    metavar="TIME",
    help="With --deep: only what was last read longer ago.",
)
@click.option(
    "--pace",
    type=Percent(1),
    metavar="PERCENT",
    help="With --deep: the share of the time in which each thread reads.",
)
@click.option("--rehearse", is_flag=True, help="Restore the snapshot in a sandbox that is ended before the job runs.")
@timeout_option
@key_file_option
@json_option
@quiet_option
def command(
    *,
    snapshot: str,
    deep: bool,
    older_than_s: float | None,
    pace: float | None,
    rehearse: bool,
    timeout_s: float | None,
    key_file: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check the snapshots of a store, one of them, or the snapshot in the folder DIR. Exit code 5: one is damaged.

    Without --deep, a store is checked for missing and truncated data. A folder is always read in full; of a container's
    images the GPU part is. With --rehearse one snapshot is restored beside what runs, up to the point where the job
    would be let go: exit code 5 means that it does not come back. Nothing outside is changed, and the job may run.

    \b
    Example:
      gpucr verify /var/snapshots/store
      gpucr verify s3://bucket/prefix#latest --deep
      gpucr verify /var/snapshots/store --deep --older-than 24h --pace 20
      gpucr verify /var/snapshots/training-0042 --rehearse
    """
    if (older_than_s is not None or pace is not None) and not (deep and is_store(snapshot)):
        raise click.UsageError("--older-than and --pace are for a store, with --deep")
    if rehearse:
        if deep:
            raise click.UsageError("--rehearse reads all data anyway: omit --deep")
        _rehearse(snapshot, key_file, timeout_s, as_json=as_json, quiet=quiet)
        return
    if timeout_s is not None:
        raise click.UsageError("--timeout is for --rehearse")
    if is_store(snapshot):
        deeply = _Deeply(older_than_s or 0.0, pace or 1.0) if deep else None
        _verify_store(snapshot, deeply, key_file=key_file, as_json=as_json, quiet=quiet)
        return
    problems: dict[str, list[str]] = {}
    opened = open_place(snapshot)
    try:
        opened.verify()
    except SnapshotDamaged as error:
        problems[opened.where] = [error.message]
    if as_json:
        counts = {"pieces": None, "packs": None, "read_bytes": opened.manifest.size_bytes}
        print_json("verify", {"checked": [opened.where], "deep": True, **counts, "damaged": problems})
    _tell(problems, "1 snapshot: every file matches its digests", silent=as_json or quiet, path=snapshot)


def _rehearse(snapshot: str, key_file: Path | None, timeout_s: float | None, *, as_json: bool, quiet: bool) -> None:
    listener = progress_printer(quiet=quiet or as_json)
    report = rehearse(open_place(snapshot, key_file), timeout_s=timeout_s, on_progress=listener)
    if not quiet:
        say_warnings(report)
    if as_json:
        print_json("verify.rehearsal", {"snapshot": snapshot_text(report.snapshot), **rehearsal_fields(report)})
    if not (as_json or quiet):
        print_phases(f"{snapshot_text(report.snapshot)}: rehearsed", report.phases, ("total", report.seconds))
        click.echo(rehearsal_text(report))


class _Deeply(NamedTuple):
    older_than_s: float
    pace: float


def _verify_store(store: str, deeply: _Deeply | None, *, key_file: Path | None, as_json: bool, quiet: bool) -> None:
    listener = progress_printer(quiet=quiet or as_json)
    deep, how = deeply is not None, deeply._asdict() if deeply is not None else {}
    report = with_key(key_file, lambda key: verify_snapshots(store, deep=deep, key=key, on_progress=listener, **how))
    names = {each.id: each.label for each in report.snapshots}
    problems = {names.get(each, each): list(texts) for each, texts in report.problems.items()}
    if as_json:
        counts = {"pieces": report.pieces, "packs": report.packs, "read_bytes": report.read_bytes}
        ids = [each.id for each in report.snapshots]
        by_id = {each: list(texts) for each, texts in report.problems.items()}
        print_json("verify", {"checked": ids, "deep": deep, **counts, "damaged": by_id})
    what = (
        f"{format_bytes(report.read_bytes)} read, all as it was written" if deep else "all is there (--deep reads it)"
    )
    count = len(report.snapshots)
    headline = f"{count} snapshot{'' if count == 1 else 's'}, {report.pieces} pieces in {report.packs} packs: {what}"
    _tell(problems, headline, silent=as_json or quiet, path=store)


def _tell(problems: dict[str, list[str]], headline: str, *, silent: bool, path: str) -> None:
    for name, texts in problems.items():
        for text in texts:
            say(printable(f"damaged: {name}: {text}"))
    if problems:
        damaged = StoreDamaged if is_store(path) else SnapshotDamaged
        raise damaged(f"damaged: {', '.join(problems)}", path=path, hint="use another snapshot, or another copy")
    if not silent:
        click.echo(headline)
