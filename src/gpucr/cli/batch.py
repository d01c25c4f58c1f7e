"""`gpucr batch`: a job under a batch system, which may take its place away."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TypedDict, get_args

import click
from msgspec import Struct

from gpucr.batch.allocation import Allocation
from gpucr.batch.contract import REQUEUE_EXIT, BatchJob, run_batch
from gpucr.batch.notice import EndNotice
from gpucr.batch.one_job import OneJob, why_more_nodes
from gpucr.batch.snapshots import require_store
from gpucr.cli.durations import Duration
from gpucr.cli.keys import given_key, key_file_option
from gpucr.cli.options import as_one, complete_file, complete_place
from gpucr.cli.output import printable, say
from gpucr.errors import InvalidRequest
from gpucr.jobs.record import Network

_SIGNALS = ("USR1", "USR2", "HUP", "INT", "XCPU", "URG", "CONT")


class _Times(TypedDict):
    """How the job ends here: members of BatchJob."""

    grace_s: float
    before_end_s: float | None
    every_s: float | None
    checkpoint_exit: int | None
    requeue_exit: int


class _Nodes(Struct, frozen=True):
    """Whether the tasks are one job, and which of its nodes this is."""

    one_job: bool
    node: int | None
    node_count: int | None
    rendezvous: str | None


class _Run(Struct, frozen=True):
    """What is run, as for `gpucr run`."""

    command_line: tuple[str, ...]
    isolate: bool | None
    network: Network | None


@click.command("batch", context_settings={"allow_interspersed_args": False})
@click.option(
    "--to", required=True, metavar="STORE", shell_complete=complete_place, help="The store for the job's snapshots."
)
@click.option("--id", "job_id", metavar="ID", help="The name of its snapshots. Default: the batch system's job id.")
@click.option(
    "--on",
    "on",
    type=click.Choice(_SIGNALS),
    multiple=True,
    help="A signal that announces the end, besides TERM. Default: USR1.",
)
@click.option(
    "--grace",
    "grace_s",
    type=Duration(),
    default="1m",
    show_default=True,
    metavar="TIME",
    help="Time limit of a dump once the end is announced.",
)
@click.option(
    "--before-limit",
    "before_end_s",
    type=Duration(),
    metavar="TIME",
    help="Dump this long before Slurm's time limit.",
)
@click.option(
    "--every", "every_s", type=Duration(), metavar="TIME", help="Also dump at this interval; the job keeps running."
)
@click.option(
    "--checkpoint-exit",
    type=click.IntRange(1, 255),
    metavar="CODE",
    help="With --every: end with this code instead, for HTCondor's checkpoint_exit_code.",
)
@click.option(
    "--requeue-exit",
    type=click.IntRange(1, 255),
    default=REQUEUE_EXIT,
    show_default=True,
    metavar="CODE",
    help="The exit code that makes the batch system start the job again.",
)
@click.option(
    "--one-job",
    is_flag=True,
    help="The tasks of this step, one a node, are one job: its parts are dumped and restored together. Needs root.",
)
@click.option("--node", type=int, metavar="K", help="With --one-job: which node this is. Default: as Slurm says.")
@click.option(
    "--nodes", "node_count", type=int, metavar="N", help="With --one-job: how many there are. Default: as Slurm says."
)
@click.option(
    "--rendezvous",
    metavar="HOST:PORT",
    help="With --one-job: node 0 listens there, and at the next port. Default: the step's first node.",
)
@click.option("--isolate/--no-isolate", default=None, help="As for `gpucr run`: its own namespaces, or the machine's.")
@click.option("--network", type=click.Choice(get_args(Network)), help="As for `gpucr run`.")
@key_file_option
@click.argument(
    "command_line", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] CMD...", shell_complete=complete_file
)
@as_one("nodes", _Nodes)
@as_one("run", _Run)
@as_one("times", _Times)
def command(
    *, to: str, job_id: str | None, on: tuple[str, ...], times: _Times, nodes: _Nodes, run: _Run, key_file: Path | None
) -> None:
    """Run CMD under a batch system, and continue it from its last snapshot at the next start.

    gpucr prints what the job prints and ends with its exit code. When a signal or the time limit announces the end of
    the allocation, it dumps the job, and its exit code asks for another start. Make it the last command of the batch
    script, with `exec`, so that it gets the signals.

    \b
    Example:
      #SBATCH --requeue --signal=B:USR1@120
      trap '' USR1
      exec gpucr batch --to "/shared/$USER/snapshots" -- python3 train.py
      exec srun gpucr batch --one-job --on URG --to /shared/s -- ./train.sh
    """
    signals = {*(signal.Signals[f"SIG{name}"] for name in on or ("USR1",)), signal.SIGTERM}
    with EndNotice(signals) as notice:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())  # blocked in `gpucr.__main__`
        try:
            with notice.interrupting():  # it may take a while
                allocation = Allocation.of(os.environ, job_id, one_job=nodes.one_job, asks_slurm=notice.reason is None)
        except KeyboardInterrupt:
            if notice.reason is None:  # Ctrl-C, which was not to announce anything
                raise
            allocation = Allocation.of(os.environ, job_id, one_job=nodes.one_job, asks_slurm=False)
        if times["before_end_s"] is not None and allocation.end_s is None:
            say("warning: --before-limit has no effect: nothing tells when the place ends")
        if times["checkpoint_exit"] is not None and times["every_s"] is None:
            raise InvalidRequest("--checkpoint-exit needs --every", hint="say how often: --every 1h")
        options = {
            name: value for name, value in (("isolate", run.isolate), ("network", run.network)) if value is not None
        }
        job = BatchJob(
            command=run.command_line,
            store=require_store(to),
            allocation=allocation,
            **times,
            signals=tuple(signals),
            one_job=_one_job(nodes, allocation, times, run),
            run_options=tuple(options.items()),
        )
        code = run_batch(
            job, lambda line: say(f"gpucr batch: {printable(line)}"), key=given_key(key_file), notice=notice
        )
    sys.exit(code)


def _one_job(nodes: _Nodes, allocation: Allocation, times: _Times, run: _Run) -> OneJob | None:
    given = (nodes.node, nodes.node_count, nodes.rendezvous)
    if not nodes.one_job:
        if given != (None, None, None):
            raise click.UsageError("--node, --nodes and --rendezvous need --one-job")
        if (why := why_more_nodes(run.command_line, os.environ)) is not None:
            say(
                f"warning: {why} says that the program has parts on other nodes, and only this one is dumped: "
                "`srun gpucr batch --one-job` dumps all together"
            )
        return None
    if times["checkpoint_exit"] is not None:
        raise click.UsageError("--checkpoint-exit is for jobs on one node, and --one-job for those on several")
    if run.network == "own":
        raise click.UsageError("--one-job needs the machine's network: leave out --network own")
    return OneJob.of(
        os.environ, allocation.id, node=nodes.node, node_count=nodes.node_count, rendezvous=nodes.rendezvous
    )
