"""`gpucr kill`: end jobs at once, or send them a signal."""

from __future__ import annotations

import signal
from typing import Any

import click

from gpucr.cli.options import JobTarget, json_option
from gpucr.cli.output import print_json
from gpucr.cli.stop import print_ends
from gpucr.operations.end_job import signal_job
from gpucr.supervise.ends import stop_job


class SignalName(click.ParamType):  # type: ignore[type-arg]  # click 8.1 knows no arguments
    """A signal by its name, with or without SIG, or its number."""

    name = "signal"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> signal.Signals:
        """Raises click's usage error if there is no such signal."""
        if isinstance(value, signal.Signals):
            return value
        text = str(value).upper()
        try:
            return signal.Signals(int(text)) if text.isdecimal() else signal.Signals[f"SIG{text.removeprefix('SIG')}"]
        except (KeyError, ValueError):
            self.fail(f"{value!r} is no signal: write TERM, SIGUSR1 or 10", param, ctx)


@click.command("kill")
@click.argument("jobs", type=JobTarget(), nargs=-1, required=True, metavar="PID|NAME...")
@click.option(
    "--signal",
    "number",
    type=SignalName(),
    default="KILL",
    show_default=True,
    metavar="NAME",
    help="Any other signal goes to the first process only.",
)
@json_option
def command(*, jobs: tuple[int | str, ...], number: signal.Signals, as_json: bool) -> None:
    """End jobs at once with SIGKILL to all their processes, or send another signal to the first process of each.

    SIGKILL ends a supervisor first, so the job stays ended. Record, log and snapshots stay.

    \b
    Example:
      gpucr kill train
      gpucr kill train --signal USR1
    """
    if number is signal.SIGKILL:
        print_ends("kill", [(job, stop_job(job, grace_s=0.0)) for job in jobs], as_json=as_json)
        return
    sent = [{"job": str(job), "pid": signal_job(job, number), "sent": number.name} for job in jobs]
    if as_json:
        print_json("kill.signal", {"jobs": sent})
        return
    for each in sent:
        click.echo(f"{each['sent']} sent to {each['job']} (process {each['pid']})")
