"""`gpucr restore`: a job back from a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, get_args

import click

from gpucr.cli.containers import print_container, refuse_other_options
from gpucr.cli.keys import key_file_option
from gpucr.cli.options import as_one, complete_place, dry_run_option, gpu_target_options, operation_options
from gpucr.cli.output import Output, print_json
from gpucr.cli.places import open_place
from gpucr.cli.reports import gpu_fields, print_phases, print_plan, report_fields, say_gpu_reasons, say_warnings
from gpucr.cli.units import warn_of_our_end
from gpucr.containers.record import is_container
from gpucr.diagnosis.preflight import FilesMode, TcpMode
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.operations.requests import RestoreRequest
from gpucr.operations.restore import plan_of_restore, run_restore
from gpucr.quantities import counted
from gpucr.undo.operation import Terms


class _Options(TypedDict):
    """How it comes back: members of RestoreRequest."""

    gpus: GpuRequest
    files: FilesMode
    tcp: TcpMode | None
    isolate: bool
    clone: bool
    name: str | None


@click.command("restore")
@click.argument("snapshot", metavar="DIR|STORE[#NAME]", shell_complete=complete_place)
@gpu_target_options
@click.option(
    "--files",
    type=click.Choice(get_args(FilesMode)),
    default="keep",
    show_default=True,
    help="Files the job was writing that have changed size: append to them (keep), or cut them back first (rewind).",
)
@click.option(
    "--tcp",
    type=click.Choice(get_args(TcpMode)),
    help="Connections to programs outside the job: closed, or taken up again. Default: as prepared by the dump.",
)
@click.option("--clone", is_flag=True, help="Make a copy with its own name and log; the original may still run.")
@click.option("--isolate", is_flag=True, help="Put the job into a sandbox, where its pids and ports are free.")
@click.option("--name", metavar="NAME", help="The job's name. Default: the old one, or NAME-2.")
@dry_run_option
@key_file_option
@operation_options
@as_one("options", _Options)
def command(
    *, snapshot: str, options: _Options, dry_run: bool, key_file: Path | None, terms: Terms, output: Output
) -> None:
    """Bring the job of a snapshot back: same pids, same memory, same GPUs or others.

    Needs root, or root's helper (`gpucr helper`). The snapshot is the folder DIR, or one in a store: by name or id,
    `latest`, or without a name the only one. It is verified and stays unchanged. If anything fails, the processes
    restored so far are ended. A snapshot of `gpucr dump --container` is restored by the container's runtime.

    \b
    Example:
      gpucr restore /var/snapshots/training-0042
      gpucr restore /var/snapshots/training-0042 --gpu auto --dry-run
      gpucr restore s3://bucket/prefix#latest --key-file /root/store.key
      gpucr restore /var/snapshots/warm-model --clone --name server-2 --gpu 1
    """
    if is_container(Path(snapshot)):
        from gpucr.containers.by_runtime import (
            restore_container,  # all that containers need: other jobs start without it
        )

        refuse_other_options("the folder of a container", ("snapshot",))
        print_container("restore", restore_container(Path(snapshot)), output)
        return
    request = RestoreRequest(open_place(snapshot, key_file), **options)
    if dry_run:
        print_plan("restore", plan_of_restore(request), output, force=terms.force)
        return
    report = run_restore(request, terms)
    if not output.quiet:
        warn_of_our_end()
        say_warnings(report)
        say_gpu_reasons(report)
    if output.as_json:
        print_json(
            "restore",
            {
                **report_fields(report),
                "seconds": report.seconds,
                **gpu_fields(report),
                "name": report.name,
                "process_count": report.processes,
            },
        )
    if not output.is_text:
        return
    known_as = f"{report.name} ({report.pid})" if report.name is not None else str(report.pid)
    headline = f"job {known_as} runs again ({counted(report.processes, 'process')})"
    print_phases(headline, report.phases, ("total", report.seconds))
