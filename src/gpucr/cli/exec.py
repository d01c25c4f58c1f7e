"""`gpucr exec`: a command inside a job's namespaces."""

from __future__ import annotations

import sys

import click

from gpucr.cli.failures import say_error
from gpucr.cli.options import JobTarget, complete_file
from gpucr.errors import InvalidRequest
from gpucr.jobs.exec_in_job import run_inside
from gpucr.jobs.visit import NO_PROGRAM

_NOT_FOUND, _NOT_RUN = 127, 126


@click.command("exec", context_settings={"allow_interspersed_args": False})
@click.argument("job", type=JobTarget(), metavar="NAME|PID")
@click.argument(
    "command_line", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] CMD...", shell_complete=complete_file
)
def command(*, job: int | str, command_line: tuple[str, ...]) -> None:
    """Run CMD inside a job's namespaces: with its pids, /dev/shm, clocks and network. CMD does not belong to the job.

    The exit code is that of CMD. As in a shell it is 127 if there is no such command, and 126 if it cannot be run.

    \b
    Example:
      gpucr exec train -- curl http://127.0.0.1:8000/health
    """
    # click leaves a "--" in front of the command where the job's name ended the options before.
    arguments = command_line[1:] if command_line[0] == "--" else command_line
    try:
        code = run_inside(job, arguments)
    except InvalidRequest as error:
        if error.code != NO_PROGRAM:
            raise
        say_error(error)
        code = _NOT_FOUND if isinstance(error.__cause__, FileNotFoundError) else _NOT_RUN
    sys.exit(code)
