"""`gpucr resume`: suspended jobs back onto their GPUs, or onto others."""

from __future__ import annotations

import click

from gpucr.cli.options import (
    dry_run_option,
    gpu_map_option,
    gpu_option,
    job_argument,
    only_option,
    operation_options,
)
from gpucr.cli.output import Output
from gpucr.cli.reports import print_change
from gpucr.gpu_state.gpu_choice import GpuRequest
from gpucr.jobs.selector import JobSelector
from gpucr.operations.requests import ResumeRequest
from gpucr.operations.suspend import run_resume
from gpucr.undo.operation import Terms


@click.command("resume")
@job_argument(is_required=False, can_be_several=True)
@click.option("--all", "every_job", is_flag=True, help="Instead of PID: all your suspended jobs.")
@gpu_map_option
@gpu_option
@dry_run_option
@only_option
@operation_options
def command(
    *,
    jobs: tuple[int | str | JobSelector, ...],
    every_job: bool,
    gpu_map: str | None,
    gpu: str | None,
    dry_run: bool,
    only: bool,
    terms: Terms,
    output: Output,
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
    if len(jobs) == 1 and not every_job and not dry_run:
        request = ResumeRequest(jobs[0], GpuRequest.of(gpu_map, gpu), only)
        print_change("resume", run_resume(request, terms), output)
        return
    from gpucr.cli import several  # one job alone needs none of it

    gpus = gpu if not jobs and not every_job else None  # which jobs; with jobs it says where they go
    several.require_one_way(jobs, on_gpus=gpus is not None, every_job=every_job, only=only)
    chosen, onto = several.Chosen(jobs or None, gpus), GpuRequest.of(gpu_map, None if gpus is not None else gpu)
    if dry_run:
        outlooks = several.plan_of_resumes(chosen, onto, only=only, force=terms.force)
        several.print_outlooks("resume", outlooks, output, force=terms.force)
    else:
        several.print_outcomes("resume", several.run_resumes(chosen, onto, terms), output)
