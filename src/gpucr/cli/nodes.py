"""`gpucr nodes`: a job whose parts are on several nodes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast, get_args

import click

from gpucr.cli.durations import Duration, Limit
from gpucr.cli.keys import key_file_option, with_key
from gpucr.cli.options import (
    as_one,
    complete_file,
    complete_place,
    force_option,
    gpu_state_option,
    gpu_target_options,
    job_argument,
    json_option,
    quiet_option,
    verbose_option,
    with_terms,
)
from gpucr.cli.output import Output, print_json
from gpucr.cli.reports import gpu_fields, print_phases, report_fields, say_gpu_reasons, say_warnings
from gpucr.cli.suggesting import SuggestingGroup
from gpucr.diagnosis.preflight import FilesMode
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.gpu_state.ways import GpuState
from gpucr.jobs.selector import JobSelector
from gpucr.nodes.dump import run_dump_part
from gpucr.nodes.places import parse_map
from gpucr.nodes.rendezvous import Rendezvous
from gpucr.nodes.restore import run_restore_part
from gpucr.nodes.secret import given_secret
from gpucr.operations.requests import DumpRequest, RestoreRequest
from gpucr.quantities import counted
from gpucr.snapshot.location import Compress
from gpucr.undo.operation import Terms

if TYPE_CHECKING:
    from gpucr.nodes.parts import PartReport

F = TypeVar("F", bound=Callable[..., Any])


class _DumpOptions(TypedDict):
    """Members of DumpRequest."""

    leave_running: bool
    gpu_state: GpuState
    compress: Compress
    encrypt: bool
    trust_store: bool


class _RestoreOptions(TypedDict):
    """Members of RestoreRequest."""

    gpus: GpuRequest
    files: FilesMode
    isolate: bool
    name: str | None


@click.group("nodes", cls=SuggestingGroup)
def command() -> None:
    """Dump and restore one job whose parts are on several nodes: all of them, or none.

    Run the same command on every node, as `srun` does. Node 0 listens at HOST:PORT, the others connect to it; one with
    another secret is refused.

    \b
    Example:
      head -c 32 /dev/urandom > ~/secret; chmod 600 ~/secret
      export GPUCR_NODES_SECRET_FILE=~/secret
      srun gpucr nodes dump train --to /shared/s#a --rendezvous n1:7788
      srun gpucr nodes restore /shared/s#a --rendezvous n1:7788
    """


def _meeting_options(function: F) -> F:
    """The command gets ``where``, a Rendezvous, and ``terms`` and ``output``."""
    options = (
        click.option(
            "--rendezvous", required=True, metavar="HOST:PORT", help="Where node 0 listens, as the others reach it."
        ),
        click.option(
            "--secret-file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            shell_complete=complete_file,
            help="The secret that all nodes have. Else GPUCR_NODES_SECRET_FILE names it, or GPUCR_NODES_SECRET has it.",
        ),
        click.option(
            "--node", type=int, envvar="SLURM_PROCID", metavar="K", help="Which node this is. Default: SLURM_PROCID."
        ),
        click.option(
            "--nodes", "node_count", type=int, envvar="SLURM_NTASKS", metavar="N",
            help="How many there are. Default: SLURM_NTASKS.",
        ),
        click.option(
            "--meet-within", "meet_s", type=Duration(), default="1m", show_default=True, metavar="TIME",
            help="How long the nodes wait for each other at first.",
        ),
        click.option(
            "--timeout", "timeout_s", type=Limit(), default="10m", show_default=True, metavar="TIME",
            help="Give up after this time, counted from the meeting, and undo on all nodes.",
        ),
    )  # fmt: skip

    @functools.wraps(function)
    def with_meeting(
        *,
        rendezvous: str,
        secret_file: Path | None,
        node: int | None,
        node_count: int | None,
        meet_s: float,
        **given: Any,
    ) -> Any:
        return function(where=_rendezvous(rendezvous, secret_file, node, node_count, meet_s), **given)

    command = with_terms(with_meeting)
    for option in reversed(options):
        command = option(command)
    return cast("F", command)


@command.command("dump", short_help="Dump this node's part of a job into a set.")
@job_argument(with_container=False)
@click.option(
    "--to", required=True, metavar="STORE#NAME", shell_complete=complete_place, help="The set, in a store of all nodes."
)
@_meeting_options
@click.option("--leave-running", is_flag=True, help="Keep the job running instead of ending it.")
@click.option(
    "--compress", type=click.Choice(get_args(Compress)), default="auto", show_default=True, help="As for `gpucr dump`."
)
@click.option("--encrypt", is_flag=True, help="Refuse stores that are not encrypted.")
@click.option("--trust-store", is_flag=True, help="Do not read and check what the store has already.")
@key_file_option
@gpu_state_option
@force_option
@json_option
@quiet_option
@verbose_option
@as_one("options", _DumpOptions)
def dump(
    *,
    job: int | str | JobSelector,
    to: str,
    where: Rendezvous,
    options: _DumpOptions,
    key_file: Path | None,
    terms: Terms,
    output: Output,
) -> None:
    """Dump this node's part of a job into the set STORE#NAME, together with all other nodes, and end it. Needs root.

    All parts stand still before the first is saved, and all are saved before the first ends. If a node fails, times out
    or dies before that, the parts on all nodes keep running, and no set comes into being.

    \b
    Example:
      export GPUCR_NODES_SECRET_FILE=~/secret
      gpucr nodes dump 47 --to /shared/s#a --rendezvous n1:7788 --node 0 --nodes 2
      srun gpucr nodes dump train --to /shared/s#a --rendezvous n1:7788
    """
    made = with_key(
        key_file,
        lambda key: run_dump_part(DumpRequest(job, to, persist="sync", **options, key=key), where, terms),
        place=to,
    )
    leave_running = options["leave_running"]
    report = made.report
    if not output.quiet:
        say_warnings(report)
    if output.as_json:
        print_json("nodes.dump", {**report_fields(report), **_set_fields(made), "left_running": leave_running})
    if not output.is_text:
        return
    after = "keeps running" if leave_running else "was ended"
    headline = f"{_name(made)}: part {made.part.node} of {made.part.node_count} dumped; the job {after}"
    print_phases(headline, report.phases, ("total", made.seconds))


@command.command("restore", short_help="Restore this node's part of a set.")
@click.argument("snapshot", metavar="STORE#NAME", shell_complete=complete_place)
@_meeting_options
@gpu_target_options
@click.option(
    "--files", type=click.Choice(get_args(FilesMode)), default="keep", show_default=True, help="As for `gpucr restore`."
)
@click.option("--isolate", is_flag=True, help="Put the part into a sandbox, where its pids and ports are free.")
@click.option(
    "--map",
    "address_map",
    multiple=True,
    metavar="OLD=NEW",
    help="A node's address has changed; repeatable. `auto`: each part gets the address of the node that restores it.",
)
@click.option("--name", metavar="NAME", help="The name of this node's part. Default: the old one, or NAME-2.")
@key_file_option
@force_option
@json_option
@quiet_option
@verbose_option
@as_one("options", _RestoreOptions)
def restore(
    *,
    snapshot: str,
    where: Rendezvous,
    options: _RestoreOptions,
    address_map: tuple[str, ...],
    key_file: Path | None,
    terms: Terms,
    output: Output,
) -> None:
    """Restore this node's part of the set STORE#NAME, together with all other nodes. Needs root.

    Node 0 says which set it is: the latest of the name. No part runs before all are there; if a node fails until then,
    what was restored is ended on all nodes, and the set stays. Connections between the parts are kept.

    \b
    Example:
      export GPUCR_NODES_SECRET_FILE=~/secret
      gpucr nodes restore /shared/s#a --rendezvous n1:7788 --node 1 --nodes 2
      srun gpucr nodes restore /shared/s#a --rendezvous n7:7788 --map auto
    """
    request, addresses = RestoreRequest(snapshot, **options), parse_map(address_map)
    made = with_key(
        key_file,
        lambda key: run_restore_part(snapshot, request, where, terms, addresses=addresses, key=key),
        place=snapshot,
    )
    report = made.report
    if not output.quiet:
        say_warnings(report)
        say_gpu_reasons(report)
    if output.as_json:
        fields = {**report_fields(report), **_set_fields(made), **gpu_fields(report)}
        print_json("nodes.restore", {**fields, "name": report.name, "process_count": report.processes})
    if not output.is_text:
        return
    known_as = f"{report.name} ({report.pid})" if report.name is not None else str(report.pid)
    part = f"part {made.part.node} of {made.part.node_count} of {_name(made)}"
    headline = f"{part} runs again as {known_as} ({counted(report.processes, 'process')})"
    print_phases(headline, report.phases, ("total", made.seconds))


def _rendezvous(
    address: str, secret_file: Path | None, node: int | None, node_count: int | None, meet_s: float
) -> Rendezvous:
    secret = given_secret(secret_file, os.environ)
    if node is None or node_count is None:
        raise click.UsageError("say which node this is, and of how many: --node K --nodes N, or start it with srun")
    return Rendezvous.at(address, node=node, node_count=node_count, secret=secret, meet_s=meet_s)


def _set_fields(made: PartReport[Any]) -> dict[str, Any]:
    part = made.part
    about = {"set_id": part.set_id, "set_name": made.name, "node": part.node, "node_count": part.node_count}
    return {**about, "seconds": made.seconds}


def _name(made: PartReport[Any]) -> str:
    return f"set {made.name} ({made.part.set_id[:8]})"
