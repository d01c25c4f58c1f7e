"""`gpucr suspend`: the GPU memory of jobs to host memory, their GPUs released."""

from __future__ import annotations

import click

from gpucr.cli.options import (
    complete_named_gpu,
    dry_run_option,
    gpu_state_option,
    job_argument,
    only_option,
    operation_options,
    pace_option,
)
from gpucr.cli.output import Output
from gpucr.cli.reports import print_change
from gpucr.gpu_state.ways import GpuState
from gpucr.jobs.selector import JobSelector
from gpucr.operations.requests import SuspendRequest
from gpucr.operations.suspend import run_suspend
from gpucr.undo.operation import Terms


@click.command("suspend")
@job_argument(is_required=False, can_be_several=True)
@click.option(
    "--gpu",
    "gpus",
    metavar="GPU,...",
    shell_complete=complete_named_gpu,
    help="Instead of PID: all your jobs on these GPUs.",
)
@click.option("--all", "every_job", is_flag=True, help="Instead of PID: all your jobs that use a GPU.")
@dry_run_option
@gpu_state_option
@pace_option
@only_option
@operation_options
def command(
    *,
    jobs: tuple[int | str | JobSelector, ...],
    gpus: str | None,
    every_job: bool,
    dry_run: bool,
    gpu_state: GpuState,
    pace: float | None,
    only: bool,
    terms: Terms,
    output: Output,
) -> None:
    """Move the GPU memory of PID and its whole tree to host memory and release its GPUs.

    The processes stay; those that call CUDA wait until `gpucr resume`. If anything fails, everything is undone. Several
    jobs are suspended one after the other; one that fails does not affect the others.

    \b
    Example:
      gpucr suspend 4711
      gpucr suspend train eval
      gpucr suspend --gpu 0,1 --dry-run
    """
    if len(jobs) == 1 and gpus is None and not every_job and not dry_run:
        print_change("suspend", run_suspend(SuspendRequest(jobs[0], gpu_state, only, pace), terms), output)
        return
    from gpucr.cli import several  # one job alone needs none of it

    several.require_one_way(jobs, on_gpus=gpus is not None, every_job=every_job, only=only)
    chosen = several.Chosen(jobs or None, gpus)
    if dry_run:
        outlooks = several.plan_of_suspends(chosen, gpu_state, only=only, force=terms.force)
        several.print_outlooks("suspend", outlooks, output, force=terms.force)
    else:
        several.print_outcomes("suspend", several.run_suspends(chosen, gpu_state, terms, pace), output)
