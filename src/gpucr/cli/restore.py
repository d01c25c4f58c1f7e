"""`gpucr restore`: a job back from a snapshot."""

from __future__ import annotations

from pathlib import Path

import click

from gpucr.cli.options import (
    force_option,
    gpu_map_option,
    json_option,
    quiet_option,
    timeout_option,
    verbose_option,
)
from gpucr.cli.output import print_json, say
from gpucr.cli.progress import progress_printer
from gpucr.cli.reports import print_phases, report_fields
from gpucr.operations.restore import restore


@click.command("restore")
@click.argument("snapshot", type=click.Path(path_type=Path), metavar="DIR")
@gpu_map_option
@timeout_option
@force_option
@json_option
@quiet_option
@verbose_option
def command(
    *,
    snapshot: Path,
    gpu_map: str | None,
    timeout_s: float | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Bring the job of the snapshot DIR back: same pids, same memory, same GPUs or those of --gpu-map. Needs root.

    The snapshot is verified before anything starts, and stays as it is. If anything fails later, the processes that
    were restored so far are ended.

    \b
    Example:
      gpucr restore /var/snapshots/training-0042
    """
    report = restore(
        snapshot,
        gpu_map=gpu_map,
        timeout_s=timeout_s,
        force=force,
        on_progress=progress_printer(quiet=quiet or as_json, verbose=verbose),
    )
    for warning in report.warnings:
        say(f"warning: {warning}")
    if as_json:
        print_json("restore", {**report_fields(report), "processes": report.processes})
        return
    print_phases(f"job {report.pid} runs again ({report.processes} processes)", report.phases, report.downtime_s)
