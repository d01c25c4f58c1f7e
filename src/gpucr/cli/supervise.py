"""`gpucr supervise`: checkpoint a job, and restore it when it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from gpucr.borrow.recovery import recover
from gpucr.cli.options import JobTarget, json_option
from gpucr.cli.output import print_json, say
from gpucr.cli.sidecars import print_missing, print_started
from gpucr.cli.supervision import supervision_options
from gpucr.cli.units import warn_of_shutdowns
from gpucr.jobs.registered import find_by_pid_or_name
from gpucr.supervise import run, start
from gpucr.supervise.folder import SupervisedFolder

if TYPE_CHECKING:
    from gpucr.supervise.settings import Supervision


@click.command("supervise")
@click.argument("job", type=JobTarget(also_ended=True), required=False, metavar="[PID|NAME]")
@supervision_options
@click.option("--foreground", is_flag=True, help="Supervise in this process instead of one in the background.")
@click.option(
    "--all", "every_job", is_flag=True, help="Start all missing supervisors. With --drain or --leave: all jobs."
)
@click.option("--drain", is_flag=True, help="Take a last dump, which ends the job, and end its supervisor.")
@click.option("--leave", is_flag=True, help="End the supervisor and leave the job running.")
@json_option
def command(
    *,
    job: int | str | None,
    supervision: Supervision | None,
    foreground: bool,
    every_job: bool,
    drain: bool,
    leave: bool,
    as_json: bool,
) -> None:
    """Supervise a running job: take checkpoints, and restore the latest when it fails, hangs or loses its GPU.

    The job must have been started with `gpucr run`, or restored from such a job's snapshot. The supervisor runs in the
    background, until the job ends with exit code 0. SIGTERM makes it take a last dump.

    \b
    Example:
      gpucr supervise train --every 10m --to /var/snapshots/store
      gpucr supervise --all
      gpucr supervise train --drain
    """
    if (job is None) is not every_job:
        raise click.UsageError("name one job, or give --all")
    if sum((supervision is not None, drain, leave)) > 1 or (every_job and (supervision is not None or foreground)):
        raise click.UsageError("--all, --drain and --leave go without options that say how to supervise")
    if drain or leave:
        names = None if job is None else [start.known_name(job)]
        ended = start.end_supervisors(names, "drain" if drain else "leave")
        _print_ended(ended, as_json=as_json)
        return
    if job is None:
        recover(say)  # a job that a killed borrower has not brought back yet must be brought back first
        print_missing(start.start_missing_supervisors(), SupervisedFolder, "supervise.all", as_json=as_json)
        return
    if supervision is None:
        raise click.UsageError("say how often and where to: --every 10m --to STORE")
    name = start.require_running(job)
    if foreground:
        start.prepare(name, supervision)
        phase = run.supervise_with_signals(name)
        if as_json:
            print_json("supervise.end", {"name": name, "phase": phase})
        raise SystemExit(0 if phase in ("finished", "left", "draining", "taken-away", "stopped") else 1)
    pid = start.supervise_job(name, supervision)
    record = find_by_pid_or_name(name).record
    warn_of_shutdowns(record.pid if record is not None else None)
    print_started(SupervisedFolder(name), pid, "supervise", as_json=as_json)


def _print_ended(names: Sequence[str], *, as_json: bool) -> None:
    ended = [(name, SupervisedFolder(name).state().phase) for name in names]
    if as_json:
        print_json("supervise.ended", {"jobs": [{"name": name, "phase": phase} for name, phase in ended]})
        return
    for name, phase in ended:
        click.echo(f"{name} {phase}")
