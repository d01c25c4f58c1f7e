"""`gpucr run`: start a job that can be frozen and brought back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from gpucr.cli.on_demand_options import on_demand_options
from gpucr.cli.options import as_one, complete_file, complete_folder, json_option
from gpucr.cli.output import print_json, printable, say
from gpucr.cli.supervision import supervision_options
from gpucr.cli.units import warn_of_our_end, warn_of_shutdowns
from gpucr.errors import GpucrError
from gpucr.jobs.record import Network
from gpucr.linux import capabilities
from gpucr.on_demand.folder import OnDemandFolder
from gpucr.operations.launch import LaunchPlan, StartedJob, launch, plan_of_launch
from gpucr.operations.requests import LaunchRequest
from gpucr.records import DEFAULT_PRIORITY, HIGHEST_PRIORITY, to_json
from gpucr.supervise.folder import SupervisedFolder

if TYPE_CHECKING:
    from gpucr.jobs.sidecar import SidecarFolder
    from gpucr.on_demand.settings import OnDemand
    from gpucr.supervise.settings import Supervision


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--name", metavar="NAME", help="The job's name. Default: the program's name and a number.")
@click.option(
    "--isolate/--no-isolate",
    default=None,
    help="Its own namespaces (an ordinary user's are made by root's helper), or the machine's. Default: its own where "
    "the privileges suffice.",
)
@click.option(
    "--network",
    type=click.Choice(get_args(Network)),
    help="An isolated job's network: its own loopback (default), or the machine's (default on several nodes).",
)
@click.option(
    "--interpose/--no-interpose",
    default=None,
    help="Load the interposer into its programs, or not. Without either: as GPUCR_INTERPOSE says (1 or 0), and without "
    "that, where there is a driver.",
)
@click.option("--log", type=click.Path(path_type=Path), metavar="FILE", help="Append the output to FILE.")
@click.option(
    "--cwd",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Start the job in the folder DIR.",
    shell_complete=complete_folder,
)
@click.option(
    "--priority",
    type=click.IntRange(0, HIGHEST_PRIORITY),
    default=DEFAULT_PRIORITY,
    show_default=True,
    metavar="P",
    help="Jobs with a higher priority may borrow its GPUs (`gpucr borrow`).",
)
@on_demand_options(
    "--on-demand",
    "Let it sleep until it is asked (`gpucr on-demand`): listen there, and forward to its JOBPORT (PORT). Repeatable.",
)
@supervision_options
@click.option(
    "--start",
    type=click.Choice(("now", "lazily")),
    default="now",
    help="With --on-demand: start the job at once (default), or at its first connection.",
)
@click.option("--explain", is_flag=True, help="Show what would be set and why; start nothing.")
@json_option
@click.argument(
    "command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] CMD...", shell_complete=complete_file
)
@as_one("request", LaunchRequest)
def command(
    *,
    request: LaunchRequest,
    supervision: Supervision | None,
    served: Callable[[Path | None], OnDemand | None],
    start: str,
    explain: bool,
    as_json: bool,
) -> None:
    """Start CMD as a job that can be frozen and brought back anywhere, and return at once.

    The job gets an environment that makes NCCL and PyTorch checkpointable, a log file, and no io_uring. As root it gets
    its own namespaces, so that pids, ports and shared memory never collide when it comes back.

    With --on-demand it sleeps while nobody asks it.

    With --every it is supervised (see `gpucr supervise`): checkpoints are taken, and it is restored when it fails.

    \b
    Example:
      gpucr run --every 10m --to /var/snapshots/store -- python3 train.py
      gpucr run --name train -- torchrun --nproc-per-node 2 train.py
      gpucr run --on-demand 8000 --http --name llama -- python3 server.py
      gpucr logs -f train
      gpucr dump train --to /var/snapshots/train
    """
    if explain:
        _print_plan(plan_of_launch(request), as_json=as_json)
        return
    settings = served(_key_file(supervision))
    if start == "lazily":
        if settings is None or supervision is not None:
            raise click.UsageError("--start lazily goes with --on-demand, and without --every")
        _start_later(request, settings, as_json=as_json)
        return
    started, pids = _start(request, supervision, settings)
    for warning in started.plan.warnings:
        say(f"warning: {warning}")
    warn_of_our_end()
    if supervision is not None:
        warn_of_shutdowns(started.record.pid)
    _print_started(started, pids, request, as_json=as_json)


def _print_started(
    started: StartedJob, pids: Mapping[str, int | None], request: LaunchRequest, *, as_json: bool
) -> None:
    record, plan = started.record, started.plan
    if as_json:
        print_json(
            "run",
            {
                "name": record.name,
                "pid": record.pid,
                "log": record.log_path,
                "isolated": record.isolated,
                "network": record.network,
                "priority": record.priority,
                "io_uring_refused": record.io_uring_is_refused,
                "interposer": plan.interposer,
                "environment": dict(record.environment),
                "warnings": list(plan.warnings),
                **pids,
            },
        )
        return
    if plan.why_not_isolated is not None and request.isolate is None:
        say(f"not isolated: {plan.why_not_isolated}")
    if plan.network == "own" and request.network is None:
        reach = "`gpucr exec` reaches it; " if capabilities.can_checkpoint_processes() else ""
        say(f"its network is a loopback of its own: {reach}--network host shares the machine's")
    click.echo(f"name  {record.name}")
    click.echo(f"pid   {record.pid}")
    click.echo(f"log   {record.log_path}")
    if (supervisor_pid := pids["supervisor_pid"]) is not None:
        click.echo(f"supervised by {supervisor_pid}: `gpucr jobs` shows it")
    if (forwarder_pid := pids["forwarder_pid"]) is not None:
        click.echo(f"forwarded by {forwarder_pid}: `gpucr on-demand --list` shows it")


def _start(
    request: LaunchRequest, supervision: Supervision | None, settings: OnDemand | None
) -> tuple[StartedJob, dict[str, int | None]]:
    """The job, and the pids of what serves it. Other jobs start without what that needs."""
    pids: dict[str, int | None] = {"supervisor_pid": None, "forwarder_pid": None}
    if settings is not None:
        from gpucr.on_demand import start as on_demand
    if supervision is not None:
        from gpucr.supervise.start import launch_supervised

        if settings is not None:
            on_demand.check_launch(request, settings)
        supervised = launch_supervised(request, supervision)
        started, pids["supervisor_pid"] = supervised.job, supervised.supervisor_pid
        if settings is not None:
            pids["forwarder_pid"] = on_demand.serve_launched(started.record.name, settings)
    elif settings is not None:
        served_job = on_demand.launch_on_demand(request, settings)
        started, pids["forwarder_pid"] = served_job.started, served_job.forwarder_pid
    else:
        started = launch(request)
    if supervision is None:
        _forget(SupervisedFolder(started.record.name))
    if settings is None:
        _forget(OnDemandFolder(started.record.name))
    return started, pids


def _forget(folder: SidecarFolder[Any, Any]) -> None:
    """What an ended job of this name may have left."""
    with contextlib.suppress(GpucrError):
        folder.forget()


def _key_file(supervision: Supervision | None) -> Path | None:
    named = supervision.key_file if supervision is not None else os.environ.get("GPUCR_KEY_FILE")
    return Path(named) if named else None


def _start_later(request: LaunchRequest, settings: OnDemand, *, as_json: bool) -> None:
    from gpucr.on_demand.start import launch_later  # other jobs start without it

    pid = launch_later(request, settings)
    if as_json:
        print_json("run.later", {"name": request.name, "forwarder_pid": pid})
        return
    click.echo(f"name  {request.name}")
    click.echo(f"it starts when it is asked: forwarded by {pid}")


def _print_plan(plan: LaunchPlan, *, as_json: bool) -> None:
    if as_json:
        print_json("run.plan", _plan_fields(plan))
        return
    click.echo(f"run         {printable(' '.join((plan.program, *plan.command[1:])))}")
    click.echo(f"in          {plan.cwd}")
    click.echo(f"isolated    {'yes: pids, mounts, IPC' if plan.isolated else f'no: {plan.why_not_isolated}'}")
    if plan.why_several_nodes is not None:
        click.echo(f"nodes       several ({printable(plan.why_several_nodes)}): this is one part, see gpucr nodes")
    click.echo(f"network     {'its own, loopback only' if plan.network == 'own' else 'the machine’s'}")
    refused = "refused, so that libraries do without it: CRIU cannot dump it"
    click.echo(f"io_uring    {refused if plan.io_uring_is_refused else 'allowed: a filter needs CAP_SYS_ADMIN'}")
    loaded = f"{plan.interposer}: device memory leaves and comes back at the bus's speed, shared or not"
    click.echo(f"interposer  {loaded if plan.interposer else f'not loaded: {plan.why_not_interposed}'}")
    for change in plan.environment:
        what = f"{change.variable}={change.value}"
        if change.is_set:
            click.echo(f"set         {what}: {change.reason}")
        else:
            click.echo(
                f"left alone  {change.variable}={printable(change.given or '')} (gpucr would set {change.value})"
            )
    for warning in plan.warnings:
        say(f"warning: {warning}")


def _plan_fields(plan: LaunchPlan) -> dict[str, Any]:
    fields = to_json(plan)
    fields["command_line"] = fields.pop("command")
    fields["io_uring_refused"] = fields.pop("io_uring_is_refused")
    fields["environment_changes"] = [{**to_json(change), "set": change.is_set} for change in plan.environment]
    del fields["environment"]
    return {**fields, "warnings": list(plan.warnings)}
