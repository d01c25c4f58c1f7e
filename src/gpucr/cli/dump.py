"""`gpucr dump`: a whole job to a snapshot, in a folder or in a store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypedDict, get_args

import click
from msgspec import Struct

from gpucr.cli.containers import print_container, refuse_other_options
from gpucr.cli.durations import Duration
from gpucr.cli.keys import key_file_option, with_key
from gpucr.cli.options import (
    as_one,
    complete_place,
    gpu_state_option,
    job_argument,
    only_option,
    operation_options,
    pace_option,
    runtime_option,
    runtime_root_option,
)
from gpucr.cli.output import Output, print_json
from gpucr.cli.reports import (
    lock_fields,
    print_phases,
    print_plan,
    rehearsal_fields,
    rehearsal_text,
    report_fields,
    say_warnings,
    snapshot_text,
)
from gpucr.containers.record import Runtime
from gpucr.diagnosis.preflight import TcpMode
from gpucr.errors import InvalidRequest
from gpucr.gpu_state.ways import GpuState
from gpucr.jobs.selector import JobSelector
from gpucr.operations.dump import DumpReport, plan_of_dump, run_dump
from gpucr.operations.plan import Plan
from gpucr.operations.requests import DumpRequest, Persist
from gpucr.quantities import format_bytes
from gpucr.records import to_json
from gpucr.snapshot.folder import Snapshot
from gpucr.snapshot.location import Compress, is_store
from gpucr.undo.operation import Terms


class _OfContainer(Struct, frozen=True):
    """A container that a runtime dumps."""

    container: str | None
    runtime: Runtime | None
    runtime_root: Path | None


class _Options(TypedDict):
    """How a job is dumped: members of DumpRequest."""

    persist: Persist
    tcp: TcpMode
    only: bool
    gpu_state: GpuState
    compress: Compress
    encrypt: bool
    trust_store: bool
    rehearse: bool
    pace: float | None
    check_known_s: float


@click.command("dump")
@job_argument(is_required=False, with_container=False)
@click.option(
    "--to",
    required=True,
    metavar="DIR|STORE[#NAME]",
    shell_complete=complete_place,
    help="A new folder, or a store and a name in it.",
)
@click.option(
    "--container", metavar="ID", help="Instead of PID: a container, dumped by its runtime (runc, crun, podman)."
)
@runtime_option
@runtime_root_option
@click.option("--leave-running", is_flag=True, help="Keep the job running instead of ending it.")
@click.option(
    "--persist",
    type=click.Choice(get_args(Persist)),
    default="background",
    show_default=True,
    help="With --leave-running: write device memory while the job runs again, or before.",
)
@click.option(
    "--tcp",
    type=click.Choice(get_args(TcpMode)),
    default="close",
    show_default=True,
    help="Connections to programs outside the job: end with it, or are kept for a restore on this machine.",
)
@click.option(
    "--compress",
    type=click.Choice(get_args(Compress)),
    default="auto",
    show_default=True,
    help="In a store: compress where that saves time, not at all, or wherever it saves bytes.",
)
@click.option("--encrypt", is_flag=True, help="Refuse stores that are not encrypted.")
@click.option("--trust-store", is_flag=True, help="In a store: never read and check what it has already.")
@click.option(
    "--check-known",
    "check_known_s",
    type=Duration(),
    default="24h",
    show_default=True,
    metavar="TIME",
    help="In a store: read and check what it has already if that was last done longer ago.",
)
@click.option(
    "--rehearse",
    is_flag=True,
    help="Before the job is ended, restore the snapshot once beside it; if that fails, the job keeps running.",
)
@pace_option
@key_file_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print what would be done and change nothing. Exit code 3: it would be refused.",
)
@gpu_state_option
@only_option
@operation_options
@as_one("of_container", _OfContainer)
@as_one("options", _Options)
def command(
    *,
    job: int | str | JobSelector | None,
    to: str,
    of_container: _OfContainer,
    leave_running: bool,
    options: _Options,
    key_file: Path | None,
    dry_run: bool,
    terms: Terms,
    output: Output,
) -> None:
    """Write PID and its whole tree to the folder DIR, or into a store, and end it.

    Needs root, or root's helper (`gpucr helper`). The processes are ended only after the snapshot is complete and
    durable. If anything fails before, they keep running and DIR is unchanged. A store (`gpucr store init`) holds many
    snapshots: what is already there is checked, not written again.

    \b
    Example:
      gpucr dump 4711 --to /var/snapshots/training-0042
      gpucr dump 4711 --to /var/snapshots/training-0043 --leave-running
      gpucr dump 4711 --to /var/snapshots/training-0044 --rehearse
      gpucr dump 4711 4712 --as-one --to /var/snapshots/both-ranks
      gpucr dump 4711 --to /var/snapshots/store#before-lunch --leave-running
      gpucr dump 4711 --to s3://bucket/prefix#nightly --key-file /root/store.key
      gpucr dump --container web --to /var/snapshots/web
    """  # fmt: skip
    if of_container.container is not None:
        _container(of_container.container, of_container, to, output, leave_running=leave_running, dry_run=dry_run)
        return
    if job is None or of_container.runtime is not None or of_container.runtime_root is not None:
        raise click.UsageError("name what to dump: PID, NAME, or --container ID with --runtime and --runtime-root")
    request = DumpRequest(job, to, leave_running, **options)
    if dry_run:
        plan = with_key(key_file, lambda key: plan_of_dump(replace(request, key=key), force=terms.force), place=to)
        print_plan("dump", plan, output, force=terms.force)
        return
    print_dump(with_key(key_file, lambda key: run_dump(replace(request, key=key), terms), place=to), output)


def _container(name: str, of: _OfContainer, to: str, output: Output, *, leave_running: bool, dry_run: bool) -> None:
    from gpucr.containers import by_runtime  # all that containers need: other jobs start without it

    refuse_other_options("--container", (*of.__struct_fields__, "to", "leave_running", "dry_run"))
    if is_store(to):
        raise InvalidRequest(f"{to} is a store, and a runtime writes to a folder", hint="name a folder with --to")
    act = by_runtime.plan_container_dump if dry_run else by_runtime.dump_container
    done = act(name, Path(to), runtime=of.runtime, runtime_root=of.runtime_root, leave_running=leave_running)
    if isinstance(done, Plan):
        print_plan("dump", done, output)
    else:
        print_container("dump", done, output)


def print_dump(report: DumpReport, output: Output) -> None:
    """Print what a dump did."""
    if not output.quiet:
        say_warnings(report)
    if output.as_json:
        print_json(
            "dump",
            {
                **report_fields(report),
                "downtime_s": report.downtime_s,
                "left_running": report.left_running,
                "lock": lock_fields(report.lock),
                "rehearsal": rehearsal_fields(report.rehearsal) if report.rehearsal is not None else None,
                "process_count": len(report.snapshot.manifest.processes),
                **to_json(report.counts),
            },
        )
    if not output.is_text:
        return
    after = "keeps running" if report.left_running else "was ended"
    headline = f"{snapshot_text(report.snapshot)}: job {report.pid} dumped; it {after}"
    print_phases(headline, report.phases, ("downtime", report.downtime_s))
    if report.rehearsal is not None:
        click.echo(rehearsal_text(report.rehearsal))
    if not isinstance(report.snapshot, Snapshot):
        seen, counts = format_bytes(report.counts.seen_bytes), report.counts
        saved = format_bytes(counts.compressed_saved_bytes)
        click.echo(
            f"{format_bytes(counts.written_bytes)} of {seen} written: {format_bytes(counts.zero_bytes)} were zero, "
            f"{format_bytes(counts.known_bytes)} known, {saved} saved by compression"
        )
