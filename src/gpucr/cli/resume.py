"""`gpucr resume`: suspended jobs back onto their GPUs, or onto others."""

from __future__ import annotations

import click

from gpucr.cli.options import (
    dry_run_option,
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
@job_argument(is_required=False, can_be_several=True)
@click.option("--all", "every_job", is_flag=True, help="Instead of PID: all your suspended jobs.")
@gpu_map_option
@gpu_option
@dry_run_option
@only_option
@timeout_option
@force_option
@json_option
@quiet_option
@verbose_option
def command(
    *,
    jobs: tuple[int | str | JobSelector, ...],
    every_job: bool,
    gpu_map: str | None,
    gpu: str | None,
    dry_run: bool,
    only: bool,
    timeout_s: float | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Bring PID and its whole tree back onto its GPUs and continue it.

    If anything fails, for example because the GPU is full, the job stays suspended and can be resumed later. Several
    jobs are resumed one after the other. Without PID and --all, --gpu chooses the suspended jobs that were on these
    GPUs.

    \b
    Example:
      gpucr resume 4711
      gpucr resume 4711 --gpu auto
      gpucr resume 4711 --gpu-map 0=1
      gpucr resume --gpu 0,1
    """
    on_progress = progress_printer(quiet=quiet or as_json, verbose=verbose)
    if len(jobs) == 1 and not every_job and not dry_run:
        report = resume(
            jobs[0], gpu_map=gpu_map, gpu=gpu, only=only, timeout_s=timeout_s, force=force, on_progress=on_progress
        )
        print_change("resume", report, as_json=as_json, quiet=quiet)
        return
    from gpucr.borrow.several import plan_resume, resume_jobs  # one job alone needs none of it
    from gpucr.cli.several import print_outcomes, print_outlooks, require_one_way

    gpus = gpu if not jobs and not every_job else None  # which jobs; with jobs it says where they go
    require_one_way(jobs, on_gpus=gpus is not None, every_job=every_job, only=only)
    chosen, onto = jobs or None, None if gpus is not None else gpu
    if dry_run:
        outlooks = plan_resume(chosen, gpus=gpus, gpu_map=gpu_map, gpu=onto, only=only, force=force)
        print_outlooks("resume", outlooks, as_json=as_json, quiet=quiet, force=force)
        return
    outcomes = resume_jobs(
        chosen, gpus=gpus, gpu_map=gpu_map, gpu=onto, timeout_s=timeout_s, force=force, on_progress=on_progress
    )
    print_outcomes("resume", outcomes, as_json=as_json, quiet=quiet)
