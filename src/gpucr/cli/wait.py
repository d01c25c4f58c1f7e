"""`gpucr wait`: wait until a job has ended."""

from __future__ import annotations

import click

from gpucr.cli.durations import Limit
from gpucr.cli.job_states import state_fields, state_text
from gpucr.cli.options import JobTarget, json_option
from gpucr.cli.output import print_json, say
from gpucr.supervise.ends import wait_job

_BY_SIGNAL = 128
"""What shells add to the number of the signal that has ended a command."""
_UNKNOWN = 1


@click.command("wait")
@click.argument("job", type=JobTarget(also_ended=True), metavar="PID|NAME")
@click.option("--timeout", "timeout_s", type=Limit(), metavar="TIME", help="Give up after this time. Exit code 6.")
@json_option
def command(*, job: int | str, timeout_s: float | None, as_json: bool) -> None:
    """Wait until a job has ended, through restarts by its supervisor, and end with its exit code.

    The exit code is 128 and the signal's number after a signal; 1 if the job was dumped or its exit status is unknown.

    \b
    Example:
      gpucr wait train && ./publish.sh
    """
    state = wait_job(job, timeout_s=timeout_s)
    if as_json:
        print_json("wait", {"job": str(job), **state_fields(state)})
    elif state.exit_code != 0:
        say(f"{job} {state_text(state)}")
    if state.exit_code is not None:
        raise SystemExit(state.exit_code)
    raise SystemExit(_UNKNOWN if state.signal is None else _BY_SIGNAL + state.signal)
