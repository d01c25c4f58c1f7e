"""`gpucr on-demand`: let a job sleep until it is asked."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpucr.cli.columns import Column, fit, terminal_width
from gpucr.cli.keys import key_file_option
from gpucr.cli.on_demand_options import on_demand_options
from gpucr.cli.options import JobTarget, dry_run_option, json_option
from gpucr.cli.output import print_json, printable
from gpucr.cli.sidecars import on_event_option, print_missing, print_started
from gpucr.errors import Unsupported
from gpucr.on_demand import run, start
from gpucr.on_demand.address import parse_all
from gpucr.on_demand.folder import OnDemandFolder
from gpucr.on_demand.listing import OnDemandJob, list_on_demand
from gpucr.quantities import format_bytes, format_seconds
from gpucr.records import to_json

if TYPE_CHECKING:
    from gpucr.on_demand.settings import OnDemand


@click.command("on-demand")
@click.argument("job", type=JobTarget(also_ended=True), required=False, metavar="[PID|NAME]")
@on_demand_options(
    "--listen",
    "Listen there (127.0.0.1 without HOST) and forward to the job's JOBPORT (PORT); or unix:PATH:JOBPORT. Repeatable.",
)
@on_event_option
@key_file_option
@click.option(
    "--foreground", is_flag=True, help="Forward in this process, for systemd; takes its sockets (LISTEN_FDS)."
)
@click.option("--leave", is_flag=True, help="End the forwarder, and leave the job as it is. Without a NAME: all.")
@click.option("--all", "every_job", is_flag=True, help="Start all missing forwarders.")
@click.option("--list", "list_only", is_flag=True, help="Show the jobs that are served on demand.")
@dry_run_option
@json_option
def command(
    *,
    job: int | str | None,
    served: Callable[[Path | None], OnDemand | None],
    key_file: Path | None,
    foreground: bool,
    leave: bool,
    every_job: bool,
    list_only: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Put a job to sleep while nobody asks it, and wake it for the next connection: many models share a GPU.

    gpucr listens for the job, and forwards to its port. A job that sleeps is suspended: its device memory is in host
    memory. Where the GPU is full, others make room: idle ones at once, the least recently used first, then those of a
    lower priority, and those of the same one in slices (--stay). Without --listen: as the job was served before.

    \b
    Example:
      gpucr run --name llama --on-demand 8000 --http -- python3 server.py
      gpucr on-demand llama --listen 0.0.0.0:8000 --idle 5m --http
      gpucr on-demand --list
      gpucr on-demand llama --leave
    """
    chosen = sum((leave, every_job, list_only))
    settings = served(key_file or (Path(named) if (named := os.environ.get("GPUCR_KEY_FILE")) else None))
    if chosen > 1 or (chosen and (settings is not None or foreground or dry_run)):
        raise click.UsageError("--leave, --all and --list go alone")
    if (every_job or list_only) and job is not None:
        raise click.UsageError("--all and --list are for all jobs")
    if list_only:
        _print_list(list_on_demand(), as_json=as_json)
    elif every_job:
        print_missing(start.start_missing_forwarders(), OnDemandFolder, "on_demand.all", as_json=as_json)
    elif leave:
        _leave(None if job is None else [_name(job)], as_json=as_json)
    elif job is None:
        raise click.UsageError("name a job, or give --all, --list or --leave")
    elif dry_run:
        _print_plan(start.plan_on_demand(job, settings or OnDemandFolder(_name(job)).settings()), as_json=as_json)
    elif foreground:
        name, _ = start.prepare(job, settings)
        run.forward(name)
    else:
        folder, pid = OnDemandFolder(_name(job)), start.serve_on_demand(job, settings)
        listen = [str(each) for each in parse_all(folder.settings().listen)]
        print_started(folder, pid, "on_demand", listen=listen, as_json=as_json)


def _name(job: int | str) -> str:
    return job if isinstance(job, str) else start.name_of(job)


def _print_plan(plan: start.OnDemandPlan, *, as_json: bool) -> None:
    if as_json:
        print_json("on_demand.plan", to_json(plan))
    else:
        for each, port in zip(plan.listen, plan.job_ports, strict=True):
            click.echo(f"listen on {printable(each)} to its port {port}, {plan.most_connections} connections at most")
        needs = ", ".join(f"{format_bytes(size)} of {uuid}" for uuid, size in plan.device_bytes.items())
        click.echo(f"{plan.name} is {plan.where}, and needs {needs or 'memory that is not known yet'}")
    if plan.problems:
        raise Unsupported(
            f"{plan.name} cannot be put to sleep: {plan.problems[0]}", hint="`gpucr suspend --dry-run` shows more"
        )


def _leave(names: Sequence[str] | None, *, as_json: bool) -> None:
    ended = start.end_forwarders(names)
    if as_json:
        print_json("on_demand.left", {"jobs": [{"name": name} for name in ended]})
        return
    for name in ended:
        click.echo(f"{name} is left as it is")


def _print_list(jobs: Sequence[OnDemandJob], *, as_json: bool) -> None:
    if as_json:
        print_json("on_demand.list", {"jobs": [to_json(job) for job in jobs]})
        return
    if not jobs:
        click.echo("no job is served on demand")
        return
    columns = (
        Column("NAME", least=16),
        Column("STATE", least=12),
        Column("IDLE", rank=2, is_number=True),
        Column("WAITING", rank=1, is_number=True),
        Column("OPEN", rank=3, is_number=True),
        Column("NEEDS", rank=4, is_number=True),
        Column("WAKES", rank=5, is_number=True),
        Column("LISTENS", rank=1, least=12),
    )
    rows = [
        (
            job.name,
            job.phase,
            "-" if job.idle_s is None or job.phase in ("unstarted", "gone") else format_seconds(job.idle_s),
            str(job.waiting),
            str(job.open_requests),
            format_bytes(sum(job.device_bytes.values())) if job.device_bytes else "-",
            str(job.counts.wake_count),
            printable(", ".join(job.listen)),
        )
        for job in jobs
    ]
    click.echo("\n".join(fit(columns, rows, terminal_width())))
