"""`gpucr ps`: who uses CUDA on this machine."""

from __future__ import annotations

import pwd

import click
from msgspec.structs import replace

from gpucr.cli.columns import terminal_width
from gpucr.cli.job_table import STATE_WORDS, as_json_records, chosen, process_lines
from gpucr.cli.options import JobTarget, json_option
from gpucr.cli.output import print_json
from gpucr.driver.gpus import list_gpus
from gpucr.errors import InvalidRequest
from gpucr.jobs.registered import find_by_pid_or_name
from gpucr.linux import processes
from gpucr.model import Gpu
from gpucr.operations.gpu_jobs import findings_of, list_gpu_jobs


@click.command("ps")
@click.option("--job", type=JobTarget(), metavar="PID|NAME", help="Only the job with this name or process.")
@click.option("--gpu", metavar="GPU", help="Only processes with memory on this GPU, by index or UUID.")
@click.option(
    "--state",
    type=click.Choice(STATE_WORDS),
    metavar="STATE",
    help="Only processes in this CUDA state, or stopped, or frozen.",
)
@click.option("--user", metavar="USER", help="Only processes of this user, by name or number.")
@click.option("--check", is_flag=True, help="Also ask preflight whether each job can be checkpointed, or why not.")
@json_option
def command(
    *, job: int | str | None, gpu: str | None, state: str | None, user: str | None, check: bool, as_json: bool
) -> None:
    """List the processes that use CUDA, suspended ones included, and the jobs that they belong to.

    Without root, other users' processes are left out. A narrow terminal shows fewer columns, never less of a state.

    \b
    Example:
      gpucr ps
      gpucr ps --gpu 0 --state running
      gpucr ps --check
    """
    if isinstance(job, str):
        find_by_pid_or_name(job)
    elif job is not None:
        processes.describe(job)
    if user is not None:
        _require_user(user)
    gpus = list_gpus()
    wanted = _find_gpu(gpu, gpus) if gpu is not None else None
    found = chosen(list_gpu_jobs(), job=job, gpu=wanted, state=state, user=user)
    if check:
        found = [replace(each, findings=findings_of(each.pid)) for each in found]
    if as_json:
        print_json("ps", as_json_records(found))
    elif found:
        click.echo("\n".join(process_lines(found, gpus, terminal_width(), checked=check)))
    else:
        filtered = any(each is not None for each in (job, gpu, state, user))
        click.echo("no process that uses CUDA fits" if filtered else "no process uses CUDA")


def _require_user(user: str) -> None:
    if user.isdecimal():
        return
    try:
        pwd.getpwnam(user)
    except (KeyError, ValueError) as e:
        raise InvalidRequest(f"there is no user {user!r}", hint="give a name, or a number") from e


def _find_gpu(text: str, gpus: tuple[Gpu, ...]) -> Gpu:
    for gpu in gpus:
        if text in (str(gpu.index), gpu.uuid):
            return gpu
    have = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    raise InvalidRequest(f"there is no GPU {text!r}", hint=f"this machine has: {have}")
