"""`gpucr borrow`: run a command on GPUs that lower-priority jobs give up for it."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, get_args

import click

from gpucr.borrow.borrower import BORROWERS_PRIORITY, BorrowPlan, BorrowRequest, plan_of_borrow, run_borrow
from gpucr.borrow.listing import Borrowed, list_borrowed
from gpucr.borrow.recovery import recover
from gpucr.cli.columns import Column, fit, terminal_width
from gpucr.cli.options import as_one, complete_file, complete_named_gpu, complete_place, dry_run_option, json_option
from gpucr.cli.output import print_json, printable, say
from gpucr.driver.gpus import list_gpus
from gpucr.jobs.record import Network
from gpucr.records import DEFAULT_PRIORITY, HIGHEST_PRIORITY


class _Options(TypedDict):
    """Members of BorrowRequest."""

    priority: int
    to: str | None
    isolate: bool | None
    network: Network | None


@click.command("borrow", context_settings={"allow_interspersed_args": False})
@click.option("--gpu", "gpus", metavar="GPU,...", shell_complete=complete_named_gpu, help="The GPUs, by index or UUID.")
@click.option(
    "--priority",
    type=click.IntRange(0, HIGHEST_PRIORITY),
    default=BORROWERS_PRIORITY,
    show_default=True,
    metavar="P",
    help=f"Jobs of a lower priority make room; `gpucr run` starts them with {DEFAULT_PRIORITY}.",
)
@click.option(
    "--to",
    metavar="DIR|STORE",
    shell_complete=complete_place,
    help="Where to dump jobs that do not fit into host memory.",
)
@click.option(
    "--key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The key of an encrypted store. Else GPUCR_KEY_FILE names it.",
)
@click.option("--no-wait", is_flag=True, help="Fail with exit code 3 instead of waiting for others.")
@click.option("--isolate/--no-isolate", default=None, help="As for `gpucr run`: its own namespaces, or the machine's.")
@click.option("--network", type=click.Choice(get_args(Network)), help="As for `gpucr run`.")
@dry_run_option
@click.option("--list", "list_only", is_flag=True, help="Show who borrows which GPUs and who waits for whom.")
@click.option("--recover", "recover_only", is_flag=True, help="Finish what killed borrowers left behind.")
@json_option
@click.argument("command_line", nargs=-1, type=click.UNPROCESSED, metavar="[--] CMD...", shell_complete=complete_file)
@as_one("options", _Options)
def command(
    *,
    gpus: str | None,
    options: _Options,
    key_file: Path | None,
    no_wait: bool,
    dry_run: bool,
    list_only: bool,
    recover_only: bool,
    as_json: bool,
    command_line: tuple[str, ...],
) -> None:
    """Run CMD on GPUs that lower-priority jobs give up for it, and bring these jobs back when it ends.

    The jobs are suspended to host memory, or dumped to --to where that is short. They come back however CMD ends, also
    when borrow itself is killed. Borrowers and jobs with the same or a higher priority are waited for. Output, signals
    and exit code are CMD's.

    \b
    Example:
      gpucr run --name train -- python3 train.py
      gpucr borrow --gpu 0,1 --dry-run -- python3 evaluate.py
      gpucr borrow --gpu 0,1 -- python3 evaluate.py
      gpucr borrow --list
    """
    if list_only or recover_only:
        if gpus is not None or command_line or dry_run or list_only is recover_only:
            raise click.UsageError("--list and --recover go alone")
        if list_only:
            _print_borrowed(list_borrowed(), as_json=as_json)
        else:
            _recover(as_json=as_json)
        return
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run, --list and --recover")
    if gpus is None or not command_line:
        raise click.UsageError("name the GPUs and what to run: --gpu 0,1 -- CMD...")
    named = key_file or os.environ.get("GPUCR_KEY_FILE")
    request = BorrowRequest(
        command_line, gpus, key_file=named if options["to"] is not None and named else None, wait=not no_wait, **options
    )
    if dry_run:
        _print_plan(plan_of_borrow(request), as_json=as_json)
        return
    sys.exit(run_borrow(request, _say))


def _print_plan(found: BorrowPlan, *, as_json: bool) -> None:
    if as_json:
        print_json("borrow.plan", {"gpus": found.gpus, "waits_for": found.waits_for, "room": dict(found.room)})
        return
    if found.waits_for:
        click.echo(f"wait for {', '.join(map(printable, found.waits_for))}")
    for name, place in found.room.items():
        click.echo(f"{printable(name)} makes room: to {'host memory' if place is None else printable(place)}")
    click.echo(f"run the command on {', '.join(found.gpus)}, then bring back what has made room")


def _say(line: str) -> None:
    say(f"gpucr borrow: {printable(line)}")


def _recover(*, as_json: bool) -> None:
    settled = recover(_say)
    if as_json:
        still_lent = [{"name": name, "waits_for": away} for name, away in settled.waiting]
        failed = [{"name": name, "message": error.message, "hint": error.hint} for name, error in settled.failed]
        print_json("borrow.recover", {"back": settled.back, "lent_jobs": still_lent, "failed": failed})
    elif not (settled.back or settled.waiting or settled.failed):
        click.echo("there is nothing to bring back")
    for name, away in settled.waiting if not as_json else ():
        click.echo(f"{name} comes back when {', '.join(away)} has ended")
    if settled.failed:
        raise SystemExit(settled.failed[0][1].exit_code)


def _print_borrowed(found: Borrowed, *, as_json: bool) -> None:
    if as_json:
        borrowers = [
            {
                "name": each.name,
                "priority": each.priority,
                "phase": each.phase,
                "gpus": each.gpus,
                "pid": each.pid,
                "command_line": each.command,
                "created": _as_time(each.created_s),
                "waits_for": each.waits_for,
                "gone": each.gone,
            }
            for each in found.borrowers
        ]
        print_json("borrow.list", {"borrowers": borrowers, "lent_jobs": found.lent})
        return
    if not found.borrowers and not found.lent:
        click.echo("nobody borrows a GPU, and no job is lent")
        return
    for line in _lines(found):
        click.echo(line)
    if any(each.gone for each in found.borrowers) or any(not each.waits_for for each in found.lent):
        say("hint:  `gpucr borrow --recover` brings back what nobody waits for any more")


def _lines(found: Borrowed) -> Sequence[str]:
    columns = (
        Column("NAME", least=16),
        Column("PRIORITY", rank=3, is_number=True),
        Column("GPUS", rank=4),
        Column("STATE", least=12),
        Column("WAITS FOR", rank=1, least=12),
        Column("COMMAND", rank=2, least=12, keeps_end=False),
    )
    indices = {gpu.uuid: str(gpu.index) for gpu in list_gpus()}

    def numbers(uuids: Sequence[str]) -> str:
        return ",".join(sorted(indices.get(uuid, "?") for uuid in uuids)) or "-"

    rows = [
        (
            each.name,
            str(each.priority),
            numbers(each.gpus),
            f"{each.phase}, gone" if each.gone else each.phase,
            ", ".join(each.waits_for) or "-",
            printable(" ".join(each.command)),
        )
        for each in found.borrowers
    ]
    rows += [
        (
            job.name,
            str(job.priority),
            numbers(job.gpus),
            "lent" if job.state == "running" else f"lent, {job.state}",
            ", ".join(job.waits_for) or "-",
            "in host memory" if job.snapshot is None else printable(job.snapshot),
        )
        for job in found.lent
    ]
    return fit(columns, rows, terminal_width())


def _as_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat("T", "seconds")
