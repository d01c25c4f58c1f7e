"""`gpucr move`: a running job to other GPUs of this machine."""

from __future__ import annotations

import click

from gpucr.cli.options import (
    as_one,
    dry_run_option,
    gpu_target_options,
    job_argument,
    only_option,
    operation_options,
    pace_option,
)
from gpucr.cli.output import Output
from gpucr.cli.reports import print_change, print_plan
from gpucr.operations.move import plan_of_move, run_move
from gpucr.operations.requests import MoveRequest
from gpucr.undo.operation import Terms


@click.command("move")
@job_argument()
@gpu_target_options
@dry_run_option
@pace_option
@only_option
@operation_options
@as_one("request", MoveRequest)
def command(*, request: MoveRequest, dry_run: bool, terms: Terms, output: Output) -> None:
    """Move PID and its whole tree, while they run, to other GPUs of this machine.

    If anything fails, the job runs as before on the GPUs that it had.

    \b
    Example:
      gpucr move 4711 --gpu 1
      gpucr move 4711 --gpu auto --dry-run
    """
    if dry_run:
        print_plan("move", plan_of_move(request, force=terms.force), output, force=terms.force)
        return
    print_change("move", run_move(request, terms), output)
