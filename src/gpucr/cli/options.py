"""Options that several commands share, so that the same word means the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from gpucr.cli.output import say
from gpucr.operations.steps import OnProgress, Progress

F = TypeVar("F", bound=Callable[..., Any])

pid_argument = click.argument("pid", type=int)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
only_option = click.option("--only", is_flag=True, help="Act on this one process, not on its whole tree.")
force_option = click.option("--force", is_flag=True, help="Go on although preflight found something blocking.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
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
    help="Put device memory on other GPUs: UUIDs, every GPU that the job can see named once.",
)


def progress_printer(*, quiet: bool) -> OnProgress | None:
    """Prints one line on stderr as each phase begins, and what happens while something is undone."""
    if quiet:
        return None

    def show(progress: Progress) -> None:
        if progress.event == "begin":
            say(progress.description)
        elif progress.event == "undo":
            say(f"undoing: {progress.phase}")
        elif progress.event == "signal-ignored":
            say(progress.description)

    return show
