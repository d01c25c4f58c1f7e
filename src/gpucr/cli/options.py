"""Options that several commands share, so that the same word means the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

pid_argument = click.argument("pid", type=int)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
only_option = click.option("--only", is_flag=True, help="Act on this one process, not on its whole tree.")
force_option = click.option("--force", is_flag=True, help="Go on although preflight found something blocking.")
quiet_option = click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
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
    help="Put device memory on other GPUs: UUIDs, every GPU that the job can see named once.",
)
