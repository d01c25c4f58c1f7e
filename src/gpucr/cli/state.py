"""`gpucr state`: the CUDA state of a job's processes."""

from __future__ import annotations

import click

from gpucr.cli.options import job_argument, json_option, only_option
from gpucr.cli.output import print_json, printable
from gpucr.cli.processes import as_json_record
from gpucr.jobs.selector import JobSelector
from gpucr.operations.listing import job_states


@click.command("state")
@job_argument()
@only_option
@json_option
def command(*, job: int | str | JobSelector, only: bool, as_json: bool) -> None:
    """Show the CUDA state of PID and its whole tree: running, locked, checkpointed, failed, or - for no CUDA.

    \b
    Example:
      gpucr state 4711
    """
    found = job_states(job, only=only)
    if as_json:
        print_json("state", {"processes": [as_json_record(each) for each in found]})
        return
    for each in found:
        click.echo(
            f"{each.process.pid} {each.state.word if each.state is not None else '-'} {printable(each.process.name)}"
        )
