"""`gpucr suspend`: a job's GPU memory to host memory, its GPUs released."""

from __future__ import annotations

import click

from gpucr.cli.options import (
    force_option,
    gpu_state_option,
    job_argument,
    json_option,
    only_option,
    quiet_option,
    timeout_option,
    verbose_option,
)
from gpucr.cli.progress import progress_printer
from gpucr.cli.reports import print_change
from gpucr.gpu_state.ways import GpuState
from gpucr.jobs.selector import JobSelector
from gpucr.operations.suspend import suspend


@click.command("suspend")
@job_argument()
@gpu_state_option
@only_option
@timeout_option
@force_option
@json_option
@quiet_option
@verbose_option
def command(
    *,
    job: int | str | JobSelector,
    gpu_state: GpuState,
    only: bool,
    timeout_s: float | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Move the GPU memory of PID and its whole tree to host memory and release its GPUs.

    The processes stay; those that call CUDA wait until `gpucr resume`. If anything fails, everything is undone.

    \b
    Example:
      gpucr suspend 4711
    """
    on_progress = progress_printer(quiet=quiet or as_json, verbose=verbose)
    report = suspend(job, gpu_state=gpu_state, only=only, timeout_s=timeout_s, force=force, on_progress=on_progress)
    print_change("suspend", report, as_json=as_json, quiet=quiet)
