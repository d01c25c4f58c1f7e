"""`gpucr move`: a running job to other GPUs of this machine."""

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
    pace_option,
    quiet_option,
    timeout_option,
    verbose_option,
)
from gpucr.cli.progress import progress_printer
from gpucr.cli.reports import print_change, print_plan
from gpucr.jobs.selector import JobSelector
from gpucr.operations.move import move, plan_move
from gpucr.operations.requests import AT_ONCE


@click.command("move")
@job_argument()
@gpu_option
@gpu_map_option
@dry_run_option
@pace_option
@only_option
@timeout_option
@force_option
@json_option
@quiet_option
@verbose_option
def command(
    *,
    job: int | str | JobSelector,
    gpu: str | None,
    gpu_map: str | None,
    dry_run: bool,
    pace: float | None,
    only: bool,
    timeout_s: float | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Move PID and its whole tree, while they run, to other GPUs of this machine.

    If anything fails, the job runs as before on the GPUs that it had.

    \b
    Example:
      gpucr move 4711 --gpu 1
      gpucr move 4711 --gpu auto --dry-run
    """
    if dry_run:
        plan = plan_move(job, gpu=gpu, gpu_map=gpu_map, only=only, force=force)
        print_plan("move", plan, as_json=as_json, quiet=quiet, force=force)
        return
    on_progress = progress_printer(quiet=quiet or as_json, verbose=verbose)
    report = move(
        job,
        gpu=gpu,
        gpu_map=gpu_map,
        only=only,
        timeout_s=timeout_s,
        pace=AT_ONCE if pace is None else pace,
        force=force,
        on_progress=on_progress,
    )
    print_change("move", report, as_json=as_json, quiet=quiet)
