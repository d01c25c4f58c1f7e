"""`gpucr top`: the current jobs that use GPUs, and keys to suspend and resume them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable

import click

from gpucr.cli.columns import terminal_width
from gpucr.cli.durations import Limit
from gpucr.cli.job_states import on_demand_text
from gpucr.cli.job_table import Kept, chosen, job_lines
from gpucr.cli.options import JobTarget
from gpucr.cli.output import printable, say
from gpucr.cli.top_work import Seen
from gpucr.driver.gpus import gpu_activity, list_gpus
from gpucr.errors import GpucrError, InvalidRequest, JobDamaged
from gpucr.on_demand.listing import look as look_on_demand
from gpucr.operations.gpu_jobs import GpuJob, list_gpu_jobs
from gpucr.supervise.folder import SupervisedFolder


@click.command("top")
@click.argument("targets", nargs=-1, type=JobTarget(), metavar="[PID|NAME]...")
@click.option(
    "--interval",
    "interval_s",
    type=Limit(0.1),
    default="2s",
    show_default=True,
    metavar="TIME",
    help="Refresh at this interval.",
)
@click.option("--once", is_flag=True, help="Print the jobs once and exit; needs no terminal.")
def command(*, targets: tuple[int | str, ...], interval_s: float, once: bool) -> None:
    """Watch the jobs that use GPUs; suspend and resume the selected one with a key, after a question.

    With PID or NAME: only these jobs.

    Keys: arrows (or j, k) select, s suspends, r resumes, c shows what stands in the way of a checkpoint, q leaves.
    While something is under way, x cancels and undoes it.

    \b
    Example:
      gpucr top
      gpucr top train
      gpucr top --once
    """

    def look() -> Seen:
        jobs = list_gpu_jobs()
        wanted = [job for job in jobs if any(chosen([job], job=target) for target in targets)] if targets else jobs
        return Seen(wanted, list_gpus(), gpu_activity(), _kept(wanted))

    if not once:
        _run(look, interval_s)
        return
    seen = look()
    lines = job_lines(seen.jobs, seen.gpus, terminal_width(), seen.kept)
    click.echo("\n".join(lines) if seen.jobs else "no process uses CUDA")


def _kept(jobs: Iterable[GpuJob]) -> dict[str, Kept]:
    """The work of supervisors and forwarders, for jobs that have or had one."""
    found = {}
    for name in {job.name for job in jobs if job.name is not None}:
        served = look_on_demand(name)
        on_demand = None if served is None else on_demand_text(served)
        age_s, restarts = None, None
        with contextlib.suppress(GpucrError):  # it never had a supervisor, or its files are damaged
            folder = SupervisedFolder(name)
            if folder.exists():
                state = folder.state()
                age_s = None if state.last_checkpoint_s is None else time.time() - state.last_checkpoint_s
                restarts = sum(state.restarts.values())
        if on_demand is not None or restarts is not None:
            found[name] = Kept(age_s, restarts, on_demand)
    return found


def _run(look: Callable[[], Seen], interval_s: float) -> None:
    hint = "`gpucr top --once` and `gpucr ps` need none"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequest("gpucr top needs a terminal, and stdin or stdout is not one", hint=hint)
    try:
        from gpucr.cli.top_screen import TerminalError, TopScreen
    except ImportError as e:
        raise InvalidRequest("gpucr top needs curses, which this Python lacks", hint=hint) from e
    top = TopScreen(look, interval_s)
    try:
        top.run()
    except TerminalError as e:
        term = os.environ.get("TERM", "")
        raise InvalidRequest(f"the terminal {term!r} cannot be used: {e}", hint=hint) from e
    finally:
        for outcome in top.outcomes:  # the screen and its messages are gone
            for line in outcome.notice.lines:
                say(printable(line))
    for error in (outcome.error for outcome in top.outcomes):
        if isinstance(error, JobDamaged) or (error is not None and not isinstance(error, GpucrError)):
            raise error
