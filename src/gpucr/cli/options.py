"""Options that several commands share, so that the same word means the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpucr.cli.output import JsonWanted
from gpucr.jobs.names import is_name

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


class JobTarget(click.ParamType):  # type: ignore[type-arg]  # click 8.1 knows no arguments
    """A pid, or the name of a job that gpucr started: an int or a str."""

    name = "pid or name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Raises click's usage error where it can be neither."""
        if isinstance(value, int):
            return value
        text = str(value)
        if is_name(text):
            return text
        try:
            return int(text)
        except ValueError:
            self.fail(f"{text!r} is neither a pid nor the name of a job", param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Names of jobs, and pids of processes that use CUDA."""
        from gpucr.cli import candidates

        return candidates.jobs(incomplete)


def _complete_gpu(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from gpucr.cli import candidates

    return candidates.gpus(incomplete)


def complete_place(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Folders and stores; behind a ``#`` the snapshots of a store."""
    from gpucr.cli import candidates

    return candidates.places(incomplete)


def complete_folder(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Folders."""
    from gpucr.cli import candidates

    return candidates.folders(incomplete)


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files of every kind."""
    from gpucr.cli import candidates

    return candidates.files(incomplete)


pid_argument = click.argument("pid", type=JobTarget(), metavar="PID|NAME")


def _note_json(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    """Remember it for errors, which are shown where the command's own options are gone."""
    wanted = ctx.find_object(JsonWanted)
    if wanted is not None:
        wanted.is_wanted = value
    return value


json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    is_eager=True,  # known before another option is refused
    callback=_note_json,
    help="Print the result as JSON on stdout.",
)
only_option = click.option("--only", is_flag=True, help="Act on this one process, not on its whole tree.")
force_option = click.option("--force", is_flag=True, help="Go on although preflight found something blocking.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="Print errors only (and the JSON of --json).")
verbose_option = click.option(
    "--verbose", "-v", is_flag=True, help="Say on stderr why each part is done in the way it is."
)
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Give up after S seconds and undo. Without it, locking is given 30 s and the rest as long as it takes.",
)
gpu_map_option = click.option(
    "--gpu-map",
    metavar="OLD=NEW,...",
    help="Put device memory on other GPUs: the job's on the left, this machine's on the right, each by its index or "
    "UUID. GPUs that are not named stay, or go where there is room.",
)
gpu_option = click.option(
    "--gpu",
    metavar="auto|GPU,...",
    shell_complete=_complete_gpu,
    help="Put the GPUs that the job uses on free ones with enough memory (auto), or on these, by index or UUID.",
)
