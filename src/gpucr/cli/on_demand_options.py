"""The options that say how a job is served on demand: `gpucr run` and `gpucr on-demand` share them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from gpucr.cli.durations import Duration
from gpucr.cli.options import complete_gpu, complete_place
from gpucr.cli.sidecars import words_of
from gpucr.on_demand.settings import OnDemand

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--idle", "idle_s", type=Duration(), metavar="TIME",
        help="Sleep after this time without a byte and without an open request. Default: 5m.",
    ),
    click.option(
        "--stay", "stay_s", type=Duration(), metavar="TIME",
        help="How long a job that is asked stays on its GPU before others get it. Default: 10s.",
    ),
    click.option(
        "--wake-timeout", "wake_timeout_s", type=Duration(), metavar="TIME",
        help="How long a request waits for the job. Default: 1m.",
    ),
    click.option(
        "--request-limit", "request_limit_s", type=Duration(), metavar="TIME",
        help="End a connection with an open request for which the job sends no byte in this time. Default: 10m.",
    ),
    click.option(
        "--http", is_flag=True, default=None,
        help="The job speaks HTTP/1.1: a request ends with its response, and gets 503 if the job cannot be woken.",
    ),
    click.option(
        "--sleep-to", metavar="STORE", shell_complete=complete_place,
        help="Where the sleeping job goes if host memory becomes short for others; made if missing. Needs root.",
    ),
    click.option(
        "--wake-on", metavar="auto|GPU,...", shell_complete=complete_gpu,
        help="Other GPUs of its model on which it may wake where its own have no room, by index or UUID; auto: all. "
        "Default: none.",
    ),
)  # fmt: skip
_NAMES = ("idle_s", "stay_s", "wake_timeout_s", "request_limit_s", "http", "sleep_to", "wake_on")


def on_demand_options(listen: str, what: str) -> Callable[[F], F]:
    """Add the options, with the addresses as ``listen``. The command gets ``served``, a function.

    It returns the settings for a key file (or None), or None without addresses. Where a command has
    `supervision_options` too, these are named above them: they share ``--on-event``.
    """

    def decorate(command: F) -> F:
        @functools.wraps(command)
        def with_settings(**options: Any) -> Any:
            addresses: tuple[str, ...] = options.pop("listen")
            given = {name: value for name in _NAMES if (value := options.pop(name, None)) is not None}
            if "wake_on" in given:
                given["wake_on"] = tuple(name.strip() for name in given["wake_on"].split(","))
            on_event = options.pop("on_event", None)
            if "every" in options and (options["every"] is not None or not addresses):
                options["on_event"] = on_event  # `gpucr run`: its supervisor gets it too, or says what is missing
            if on_event is not None and (addresses or "every" not in options):
                given["on_event"] = words_of(on_event)
            if given and not addresses:
                raise click.UsageError(f"say where to listen: {listen} 8000")

            def settings(key_file: Path | None = None) -> OnDemand | None:
                if not addresses:
                    return None
                made = OnDemand(addresses, **given, key_file=None if key_file is None else str(key_file))
                made.check()
                return made

            return command(served=settings, **options)

        for option in reversed(_OPTIONS):
            with_settings = option(with_settings)
        with_settings = click.option(listen, "listen", multiple=True, metavar="[HOST:]PORT[:JOBPORT]", help=what)(
            with_settings
        )
        return cast("F", with_settings)

    return decorate
