"""`gpucr resume`: a suspended job back onto its GPUs, or onto others."""

from __future__ import annotations

import click

from gpucr.cli.options import (
    force_option,
    gpu_map_option,
    gpu_option,
    job_argument,
    json_option,
    only_option,
    quiet_option,
    timeout_option,
    verbose_option,
)
from gpucr.cli.progress import progress_printer
from gpucr.cli.reports import print_change
from gpucr.jobs.selector import JobSelector
from gpucr.operations.suspend import resume


@click.command("resume")
@job_argument()
@gpu_map_option
@gpu_option
@only_option
@timeout_option
@force_option
@json_option
@quiet_option
@verbose_option
def command(
    *,
    job: int | str | JobSelector,
    gpu_map: str | None,
    gpu: str | None,
    only: bool,
    timeout_s: float | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Bring PID and its whole tree back onto its GPUs and let it go on.

    If anything fails, for example because the GPU is full, the job is suspended as before and can be resumed later.

    \b
    Example:
      gpucr resume 4711
      gpucr resume 4711 --gpu auto
      gpucr resume 4711 --gpu-map 0=1
    """
    on_progress = progress_printer(quiet=quiet or as_json, verbose=verbose)
    report = resume(job, gpu_map=gpu_map, gpu=gpu, only=only, timeout_s=timeout_s, force=force, on_progress=on_progress)
    print_change("resume", report, as_json=as_json, quiet=quiet)
