"""`gpucr suspend`: the GPU memory of jobs to host memory, their GPUs released."""

from __future__ import annotations

import click

from gpucr.cli.options import (
    complete_named_gpu,
    dry_run_option,
    force_option,
    gpu_state_option,
    job_argument,
    json_option,
    only_option,
    pace_option,
    quiet_option,
    timeout_option,
    verbose_option,
)
from gpucr.cli.progress import progress_printer
from gpucr.cli.reports import print_change
from gpucr.gpu_state.ways import GpuState
from gpucr.jobs.selector import JobSelector
from gpucr.operations.requests import AT_ONCE
from gpucr.operations.suspend import suspend


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
@timeout_option
@force_option
@json_option
@quiet_option
@verbose_option
def command(
    *,
    jobs: tuple[int | str | JobSelector, ...],
    gpus: str | None,
    every_job: bool,
    dry_run: bool,
    gpu_state: GpuState,
    pace: float | None,
    only: bool,
    timeout_s: float | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
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
    on_progress = progress_printer(quiet=quiet or as_json, verbose=verbose)
    if len(jobs) == 1 and gpus is None and not every_job and not dry_run:
        report = suspend(
            jobs[0],
            gpu_state=gpu_state,
            only=only,
            timeout_s=timeout_s,
            pace=AT_ONCE if pace is None else pace,
            force=force,
            on_progress=on_progress,
        )
        print_change("suspend", report, as_json=as_json, quiet=quiet)
        return
    from gpucr.borrow.several import plan_suspend, suspend_jobs  # one job alone needs none of it
    from gpucr.cli.several import print_outcomes, print_outlooks, require_one_way

    require_one_way(jobs, on_gpus=gpus is not None, every_job=every_job, only=only)
    chosen = jobs or None
    if dry_run:
        outlooks = plan_suspend(chosen, gpus=gpus, gpu_state=gpu_state, only=only, force=force)
        print_outlooks("suspend", outlooks, as_json=as_json, quiet=quiet, force=force)
        return
    outcomes = suspend_jobs(
        chosen,
        gpus=gpus,
        gpu_state=gpu_state,
        timeout_s=timeout_s,
        pace=AT_ONCE if pace is None else pace,
        force=force,
        on_progress=on_progress,
    )
    print_outcomes("suspend", outcomes, as_json=as_json, quiet=quiet)
