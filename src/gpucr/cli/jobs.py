"""`gpucr jobs`: the jobs that gpucr started."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import click

from gpucr.cli.columns import Column, fit, terminal_width, wrapped
from gpucr.cli.job_states import on_demand_text, state_text
from gpucr.cli.options import JobTarget, json_option
from gpucr.cli.output import print_json, printable
from gpucr.errors import GpucrError, InvalidRequest
from gpucr.jobs import others
from gpucr.jobs.record import JobRecord
from gpucr.jobs.registered import find_by_pid_or_name
from gpucr.jobs.registry import ListedJob, is_gone
from gpucr.jobs.sidecar import as_time
from gpucr.model import ProcessId
from gpucr.on_demand.folder import OnDemandFolder
from gpucr.on_demand.listing import OnDemandJob, list_on_demand
from gpucr.operations.gpu_jobs import device_bytes_of_jobs
from gpucr.operations.launch import forget_jobs, list_jobs, with_cuda_states
from gpucr.quantities import format_bytes, format_seconds
from gpucr.records import DEFAULT_PRIORITY, to_json
from gpucr.supervise.folder import UNFINISHED, SupervisedFolder, SupervisedState

_OPTIONAL = (
    Column("PRIORITY", rank=10, is_number=True),
    Column("LENT TO", rank=2, least=8),
    Column("GPU", rank=5, is_number=True),
    Column("SNAPSHOT", rank=6, is_number=True),
    Column("NEXT", rank=8, is_number=True),
    Column("RESTARTS", rank=7, is_number=True),
    Column("SUPERVISOR", rank=9, is_number=True),
    Column("ON DEMAND", rank=2, least=8),
)
"""Shown if a job has something to show there."""
_COLUMNS = (
    Column("NAME", least=32),
    Column("PID", rank=1, is_number=True),
    Column("STATE", least=24),
    Column("AGE", rank=3, is_number=True),
    *_OPTIONAL,
    Column("ISOLATED", rank=4),
    Column("COMMAND", rank=2, least=12, keeps_end=False),
)


@click.command("jobs")
@click.argument("targets", nargs=-1, type=JobTarget(also_ended=True), metavar="[NAME|PID]...")
@click.option("--all", "show_all", is_flag=True, help="Also show ended jobs that nothing restarts.")
@click.option("--all-users", is_flag=True, help="Also show other users' running jobs, as USER/JOB. Root only.")
@click.option(
    "--forget",
    is_flag=True,
    help="Remove the records and logs of these jobs, which no longer run. A dumped job's log is kept.",
)
@click.option(
    "--force",
    is_flag=True,
    help="With --forget: also a job that may run elsewhere, and a dumped job's log.",
)
@json_option
def command(
    *, targets: tuple[int | str, ...], show_all: bool, all_users: bool, forget: bool, force: bool, as_json: bool
) -> None:
    """List the jobs that `gpucr run` started: name, pid, state, age, device memory, supervision, isolation, command.

    With NAME: only these jobs, ended or not. A name stands for the pid in all commands. Each user has their own list;
    root can name other users' running jobs as USER/JOB.

    \b
    Example:
      gpucr jobs --all
      sudo gpucr jobs --all-users
      gpucr jobs --forget train test
    """
    if force and not forget:
        raise InvalidRequest("--force goes with --forget NAME", hint="leave it out")
    if forget and not targets:
        raise InvalidRequest("--forget does not say which jobs", hint="name them: gpucr jobs --forget NAME")
    if all_users and forget:
        raise InvalidRequest("--forget is for jobs of your own", hint="omit --all-users")
    more: Mapping[str, _More] = {}
    if forget:
        found: Sequence[ListedJob] = forget_jobs(map(str, targets), force=force)
        for job in found:
            SupervisedFolder(job.name).remove()
            OnDemandFolder(job.name).remove()
        if not as_json:
            for job in found:
                click.echo(f"{job.name} forgotten ({_state_text(job)}){_kept(job, force=force)}")
            return
    else:
        named = map(_find, dict.fromkeys(targets))
        found = with_cuda_states(named) if targets else list_jobs(all_users=all_users)
        more = _more(found)
        if not targets and not show_all:
            found = [job for job in found if job.state.word != "ended" or more[job.name].is_wanted]
    if as_json:
        print_json("jobs", {"jobs": [_as_json_record(job, more.get(job.name, _More())) for job in found]})
    else:
        _print_table(found, more)


def _find(target: int | str) -> ListedJob:
    """The job of this user, or for root, as USER/JOB, a running one of another user. Raises InvalidRequest."""
    if isinstance(target, str) and others.SEPARATOR in target:
        return others.find_running(target)
    return find_by_pid_or_name(target)


def _kept(job: ListedJob, *, force: bool) -> str:
    """What remains of a forgotten job."""
    if job.record is None:
        return "; its logs are kept, for it may still run"
    if job.state.word == "dumped" and not force:
        return f"; its log is kept for a restore: {printable(job.record.log_path)}"
    return ""


@dataclass(frozen=True)
class _More:
    """Information about a job besides its record. ``state`` and ``supervisor`` are None if it is not supervised.

    ``restart``: its state in words, if it has ended and its supervisor is about to restart it.
    """

    device_bytes: int | None = None
    state: SupervisedState | None = None
    supervisor: ProcessId | None = None
    is_lent: bool = False
    waits_for: tuple[str, ...] = ()
    is_dumped: bool = False
    restart: str | None = None
    on_demand: OnDemandJob | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether it is to run: a supervisor restarts it, should do so, or has given up."""
        return self.state is not None and self.state.phase in (*UNFINISHED, "gave-up")

    def cells(self, record: JobRecord | None) -> tuple[str, ...]:
        """The optional columns' cells."""
        is_usual = record is None or record.priority == DEFAULT_PRIORITY
        lent_to = (", ".join(self.waits_for) or "nobody") if self.is_lent else "-"
        priority = "-" if is_usual or record is None else str(record.priority)
        return (priority, lent_to, *self._other_cells(), on_demand_text(self.on_demand))

    def _other_cells(self) -> tuple[str, ...]:
        now_s, state = time.time(), self.state
        memory = "-" if self.device_bytes is None else format_bytes(self.device_bytes)
        if state is None:
            return (memory, "-", "-", "-", "-")
        last_s, next_s = state.last_checkpoint_s, state.next_checkpoint_s
        return (
            memory,
            "-" if last_s is None else f"{format_seconds(max(now_s - last_s, 0.0))} ago",
            "-" if next_s is None or self.supervisor is None else f"in {format_seconds(max(next_s - now_s, 0.0))}",
            str(sum(state.restarts.values())),
            str(self.supervisor.pid) if self.supervisor is not None else self.word,
        )

    @property
    def word(self) -> str:
        """The state of the supervision; ``missing``: there should be one; ``drained``: it has taken a last dump."""
        if self.state is None:
            return "-"
        if self.is_dumped and self.state.phase == "draining":
            return "drained"
        return "missing" if self.state.phase in UNFINISHED else self.state.phase


def _more(found: Sequence[ListedJob]) -> dict[str, _More]:
    """Information besides the records, by name."""
    held: dict[int, int] = {}
    with contextlib.suppress(GpucrError):
        held = device_bytes_of_jobs([job.record.pid for job in found if job.record and job.state.word == "running"])
    more: dict[str, _More] = {}
    lent: dict[str, tuple[str, ...]] = {}
    if any(job.record is not None and job.record.lent is not None for job in found):
        from gpucr.borrow.listing import list_borrowed  # hardly ever needed

        with contextlib.suppress(GpucrError):
            lent = {each.name: each.waits_for for each in list_borrowed().lent}
    served = {each.name: each for each in list_on_demand()}
    for job in found:
        if others.SEPARATOR in job.name:  # other users' supervision is not shown
            more[job.name] = _More(held.get(job.record.pid) if job.record is not None else None)
            continue
        device_bytes = held.get(job.record.pid) if job.record is not None and job.state.word == "running" else None
        folder, state, supervisor = SupervisedFolder(job.name), None, None
        with contextlib.suppress(GpucrError):  # whoever needs it reports damage
            if folder.exists():
                state, supervisor = folder.state(), folder.running()
        is_dumped, restart = job.state.word == "dumped", None
        if job.state.word in ("ended", "lost") and job.state.exit_code != 0 and supervisor is not None:
            restart = state_text(job.state, word="restarting")
        more[job.name] = _More(
            device_bytes, state, supervisor, job.name in lent, lent.get(job.name, ()), is_dumped, restart,
            served.get(job.name),
        )  # fmt: skip
    return more


def _print_table(found: Sequence[ListedJob], more: Mapping[str, _More] = MappingProxyType({})) -> None:
    if not found:
        click.echo("no jobs; `gpucr jobs --all` also shows those that have ended")
        return
    width = terminal_width()
    rows = [_row(job, more.get(job.name, _More())) for job in found]
    unused = {each for each in _OPTIONAL if all(row[_COLUMNS.index(each)] == "-" for row in rows)}
    columns = [column for column in _COLUMNS if column not in unused]
    used = [[cell for column, cell in zip(_COLUMNS, row, strict=True) if column not in unused] for row in rows]
    click.echo("\n".join(fit(columns, used, width)))
    for job in found:
        if job.state.problem is not None:
            click.echo("\n".join(wrapped(printable(job.state.problem), width, first=f"{job.name}: ", indent=2)))


def _row(job: ListedJob, more: _More) -> tuple[str, ...]:
    record = job.record
    if record is None:
        return (job.name, "-", _state_text(job), "-", *more.cells(None), "-", "-")
    return (
        job.name,
        str(record.pid),
        more.restart or _state_text(job),
        _age(record.created),
        *more.cells(record),
        "yes" if record.isolated else "no",
        printable(" ".join(record.command)),
    )


def _state_text(job: ListedJob) -> str:
    """The state with details: ``ended (exit code 1)``, ``dumped (/var/snap/a)``."""
    state = job.state
    detail: str | None = None
    if state.word == "dumped" and job.record is not None and job.record.snapshot is not None:
        detail = job.record.snapshot + (", which is gone" if is_gone(job.record.snapshot) else "")
    elif state.word == "elsewhere" and job.record is not None:
        detail = job.record.host
    return state_text(state, detail)


def _age(created: str) -> str:
    try:
        then = datetime.datetime.fromisoformat(created)
        seconds = (datetime.datetime.now(datetime.timezone.utc) - then).total_seconds()
    except (ValueError, TypeError):  # not a time, or one without a zone
        return "?"
    return format_seconds(max(seconds, 0.0))


def _as_json_record(job: ListedJob, more: _More) -> dict[str, Any]:
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
        "priority": record and record.priority,
        "lent": record and record.lent is not None,
        "waits_for": more.waits_for,
        "held_bytes": more.device_bytes,
        "supervision": _supervision_fields(more),
        "on_demand": more.on_demand and to_json(more.on_demand),
    }


def _supervision_fields(more: _More) -> dict[str, Any] | None:
    state = more.state
    if state is None:
        return None
    return {
        "phase": state.phase,
        "supervisor_pid": more.supervisor and more.supervisor.pid,
        "interval_s": state.interval_s,
        "last_checkpoint": None if state.last_checkpoint_s is None else as_time(state.last_checkpoint_s),
        "next_checkpoint": None if state.next_checkpoint_s is None else as_time(state.next_checkpoint_s),
        "restarts": dict(state.restarts),
        "checkpoints": dict(state.checkpoints),
    }
