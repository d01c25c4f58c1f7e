"""`gpucr stop`: end jobs, with time to end by themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from gpucr.cli.durations import Duration
from gpucr.cli.job_states import state_fields, state_text
from gpucr.cli.options import JobTarget, json_option
from gpucr.cli.output import print_json
from gpucr.jobs.record import JobState
from gpucr.supervise.ends import stop_job


@click.command("stop")
@click.argument("jobs", type=JobTarget(), nargs=-1, required=True, metavar="PID|NAME...")
@click.option(
    "--grace",
    type=Duration(),
    default="10s",
    show_default=True,
    metavar="TIME",
    help="How long to wait after SIGTERM.",
)
@json_option
def command(*, jobs: tuple[int | str, ...], grace: float, as_json: bool) -> None:
    """End jobs: SIGTERM to the first process of each, and after --grace SIGKILL to the rest.

    A supervisor is ended first, so the job stays ended. Record, log and snapshots stay.

    \b
    Example:
      gpucr stop train --grace 1m
    """
    print_ends("stop", [(job, stop_job(job, grace_s=grace)) for job in jobs], as_json=as_json)


def print_ends(command_name: str, ends: Iterable[tuple[int | str, JobState]], *, as_json: bool) -> None:
    """How each of them ended."""
    ended: list[dict[str, Any]] = []
    for job, state in ends:
        ended.append({"job": str(job), **state_fields(state)})
        if not as_json:
            click.echo(f"{job} {state_text(state)}")
    if as_json:
        print_json(command_name, {"jobs": ended})
