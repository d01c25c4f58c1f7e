"""`gpucr logs`: what a job printed."""

from __future__ import annotations

import sys

import click

from gpucr.cli.options import JobTarget
from gpucr.cli.output import lost_stdout
from gpucr.jobs.log import job_log


@click.command("logs")
@click.argument("job", type=JobTarget(also_ended=True), metavar="NAME|PID")
@click.option("--follow", "-f", is_flag=True, help="Follow until the job ends, through dumps and restores.")
@click.option("--lines", "-n", type=click.IntRange(min=0), metavar="LINES", help="Only the last LINES lines.")
def command(*, job: int | str, follow: bool, lines: int | None) -> None:
    """Print the log of a job that `gpucr run` started: its standard output and standard error.

    \b
    Example:
      gpucr logs -f -n 20 train
    """
    out = sys.stdout.buffer
    for piece in job_log(job, last_lines=lines, follow=follow):
        out.write(piece)
        out.flush()
        if lost_stdout() is not None:
            return
