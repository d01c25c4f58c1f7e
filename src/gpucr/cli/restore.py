"""`gpucr restore`: a job back from a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict, get_args

import click

from gpucr.cli.containers import print_container, refuse_other_options
from gpucr.cli.keys import key_file_option
from gpucr.cli.options import (
    complete_place,
    dry_run_option,
    force_option,
    gpu_map_option,
    gpu_option,
    json_option,
    quiet_option,
    timeout_option,
    verbose_option,
)
from gpucr.cli.output import print_json
from gpucr.cli.places import open_place
from gpucr.cli.progress import progress_printer
from gpucr.cli.reports import gpu_fields, print_phases, print_plan, report_fields, say_gpu_reasons, say_warnings
from gpucr.cli.units import warn_of_our_end
from gpucr.containers.record import is_container
from gpucr.diagnosis.preflight import FilesMode, TcpMode
from gpucr.operations.restore import plan_restore, restore
from gpucr.quantities import counted


class _Options(TypedDict):
    """What a plan and a restore have in common."""

    gpu_map: str | None
    gpu: str | None
    files: FilesMode
    tcp: TcpMode | None
    clone: bool
    isolate: bool
    name: str | None


@click.command("restore")
@click.argument("snapshot", metavar="DIR|STORE[#NAME]", shell_complete=complete_place)
@gpu_map_option
@gpu_option
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
@timeout_option
@force_option
@json_option
@quiet_option
@verbose_option
def command(
    *,
    snapshot: str,
    gpu_map: str | None,
    gpu: str | None,
    files: FilesMode,
    tcp: TcpMode | None,
    clone: bool,
    isolate: bool,
    name: str | None,
    dry_run: bool,
    key_file: Path | None,
    timeout_s: float | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
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
        print_container("restore", restore_container(Path(snapshot)), as_json=as_json, quiet=quiet)
        return
    listener = progress_printer(quiet=quiet or as_json, verbose=verbose)
    opened = open_place(snapshot, key_file)
    options: _Options = {
        "gpu_map": gpu_map, "gpu": gpu, "files": files, "tcp": tcp, "clone": clone, "isolate": isolate, "name": name,
    }  # fmt: skip
    if dry_run:
        print_plan("restore", plan_restore(opened, **options), as_json=as_json, quiet=quiet, force=force)
        return
    report = restore(
        opened,
        **options,
        timeout_s=timeout_s,
        force=force,
        on_progress=listener,
    )
    if not quiet:
        warn_of_our_end()
        say_warnings(report)
        say_gpu_reasons(report)
    if as_json:
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
    if as_json or quiet:
        return
    known_as = f"{report.name} ({report.pid})" if report.name is not None else str(report.pid)
    headline = f"job {known_as} runs again ({counted(report.processes, 'process')})"
    print_phases(headline, report.phases, ("total", report.seconds))
