"""`gpucr jobs`: the jobs that gpucr started."""

from __future__ import annotations

import datetime
import signal
from collections.abc import Sequence
from typing import Any

import click

from gpucr.cli.columns import Column, fit, terminal_width, wrapped
from gpucr.cli.options import json_option
from gpucr.cli.output import print_json, printable
from gpucr.errors import InvalidRequest
from gpucr.jobs.registered import is_gone
from gpucr.jobs.registry import ListedJob
from gpucr.operations.launch import forget_jobs, list_jobs
from gpucr.quantities import format_seconds

_COLUMNS = (
    Column("NAME", least=32),
    Column("PID", rank=1, is_number=True),
    Column("STATE", least=24),
    Column("AGE", rank=3, is_number=True),
    Column("ISOLATED", rank=4),
    Column("COMMAND", rank=2, least=12, keeps_end=False),
)


@click.command("jobs")
@click.option("--all", "show_all", is_flag=True, help="Also those that have ended.")
@click.option(
    "--forget",
    "forgotten",
    metavar="NAME",
    multiple=True,
    help="Remove the record and the logs of a job that does not run any more. The log of one that was dumped is kept.",
)
@click.option(
    "--force",
    is_flag=True,
    help="With --forget: also what may run elsewhere, and the log of a dumped job.",
)
@json_option
def command(*, show_all: bool, forgotten: tuple[str, ...], force: bool, as_json: bool) -> None:
    """List the jobs that `gpucr run` started: name, pid, state, age, whether isolated, command.

    The names stand for pids in all commands. Each user has a list of their own.

    \b
    Example:
      gpucr jobs --all
      gpucr jobs --forget train --forget test
    """
    if force and not forgotten:
        raise InvalidRequest("--force goes with --forget NAME", hint="leave it out")
    if forgotten:
        found: Sequence[ListedJob] = forget_jobs(forgotten, force=force)
        if not as_json:
            for job in found:
                click.echo(f"{job.name} forgotten ({_state_text(job)}){_kept(job, force=force)}")
            return
    else:
        found = [job for job in list_jobs() if show_all or job.state.word != "ended"]
    if as_json:
        print_json("jobs", {"jobs": [_as_json_record(job) for job in found]})
    else:
        _print_table(found)


def _kept(job: ListedJob, *, force: bool) -> str:
    """What is left of a job that was forgotten."""
    if job.record is None:
        return "; its logs are kept, for it may still run"
    if job.state.word == "dumped" and not force:
        return f"; its log is kept for a restore: {printable(job.record.log_path)}"
    return ""


def _print_table(found: Sequence[ListedJob]) -> None:
    if not found:
        click.echo("no jobs; `gpucr jobs --all` also shows those that have ended")
        return
    width = terminal_width()
    click.echo("\n".join(fit(_COLUMNS, [_row(job) for job in found], width)))
    for job in found:
        if job.state.problem is not None:
            click.echo("\n".join(wrapped(printable(job.state.problem), width, first=f"{job.name}: ", indent=2)))


def _row(job: ListedJob) -> tuple[str, ...]:
    record = job.record
    if record is None:
        return (job.name, "-", _state_text(job), "-", "-", "-")
    return (
        job.name,
        str(record.pid),
        _state_text(job),
        _age(record.created),
        "yes" if record.isolated else "no",
        printable(" ".join(record.command)),
    )


def _state_text(job: ListedJob) -> str:
    """The state with what is known of it: ``ended (exit code 1)``, ``dumped (/var/snap/a)``."""
    state = job.state
    detail: str | None = None
    if state.exit_code is not None:
        detail = f"exit code {state.exit_code}"
    elif state.signal is not None:
        detail = _signal_name(state.signal)
    elif state.word == "dumped" and job.record is not None and job.record.snapshot is not None:
        detail = job.record.snapshot + (", which is gone" if is_gone(job.record.snapshot) else "")
    elif state.word == "elsewhere" and job.record is not None:
        detail = job.record.host
    return state.word if detail is None else f"{state.word} ({printable(detail)})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _age(created: str) -> str:
    try:
        then = datetime.datetime.fromisoformat(created)
        seconds = (datetime.datetime.now(datetime.timezone.utc) - then).total_seconds()
    except (ValueError, TypeError):  # not a time, or one without a zone
        return "?"
    return format_seconds(max(seconds, 0.0))


def _as_json_record(job: ListedJob) -> dict[str, Any]:
    record = job.record
    return {
        "name": job.name,
        "state": job.state.word,
        "exit_code": job.state.exit_code,
        "signal": job.state.signal,
        "problem": job.state.problem,
        "pid": record and record.pid,
        "keeper_pid": record and record.keeper and record.keeper.pid,
        "command_line": list(record.command) if record else [],
        "cwd": record and record.cwd,
        "environment": dict(record.environment) if record else {},
        "isolated": record and record.isolated,
        "network": record and record.network,
        "io_uring_refused": record and record.io_uring_is_refused,
        "created": record and record.created,
        "host": record and record.host,
        "log": record and record.log_path,
        "snapshot": record and record.snapshot,
        "snapshot_is_gone": record and record.snapshot and is_gone(record.snapshot),
    }
