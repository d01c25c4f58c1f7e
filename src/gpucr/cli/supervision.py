"""The options that say how a job is supervised: `gpucr run` and `gpucr supervise` share them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from msgspec import structs

from gpucr.cli.durations import Duration
from gpucr.cli.keys import given_key, key_file_option
from gpucr.cli.options import complete_place, keep_options
from gpucr.cli.sidecars import on_event_option, words_of

if TYPE_CHECKING:
    from gpucr.supervise.settings import Supervision

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--every",
        type=Duration("auto"),
        metavar="TIME|auto",
        help="Take a checkpoint at this interval (10m), or as often as loses the least time (auto).",
    ),
    click.option(
        "--to", metavar="STORE", shell_complete=complete_place, help="The store for checkpoints; made if missing."
    ),
    click.option("--mtbf", type=Duration(), metavar="TIME", help="Mean time between failures, for auto. Default: 1d."),
    functools.partial(keep_options, default=" Default, without another --keep option: 5."),
    click.option(
        "--rehearse", type=click.IntRange(min=1), metavar="N",
        help="Rehearse every Nth checkpoint while the job runs; --keep-last and others count those that came back.",
    ),
    key_file_option,
    click.option(
        "--files",
        type=click.Choice(("rewind", "keep")),
        help="At a restart, cut grown files back and keep the rest beside them (default), or leave them.",
    ),
    click.option(
        "--output-timeout", "output_timeout_s", type=Duration(), metavar="TIME",
        help="The job hangs if it prints nothing for this long.",
    ),
    click.option(
        "--heartbeat", type=click.Path(path_type=Path), metavar="FILE", help="The job hangs if it does not touch FILE."
    ),
    click.option(
        "--heartbeat-timeout", "heartbeat_timeout_s", type=Duration(), metavar="TIME",
        help="How long FILE may stay untouched. Default: 10m.",
    ),
    click.option("--health", metavar="CMD", help="The job hangs if CMD fails three times in a row. No shell runs it."),
    click.option(
        "--health-every", "health_every_s", type=Duration(), metavar="TIME",
        help="How often CMD runs, and its time limit. Default: 1m.",
    ),
    click.option(
        "--gpu-idle", "gpu_idle_s", type=Duration(), metavar="TIME",
        help="The job hangs if its GPUs are idle for this long.",
    ),
    click.option(
        "--crashes", type=click.IntRange(min=1), metavar="K",
        help="After K failures from one snapshot, take the one before. Default: 3.",
    ),
    click.option(
        "--crash-window", "crash_window_s", type=Duration(), metavar="TIME",
        help="The time within which these failures count. Default: 1h.",
    ),
    click.option(
        "--max-restarts", type=click.IntRange(min=1), metavar="N",
        help="Give up after N restarts without a checkpoint beyond the last failure. Default: 10.",
    ),
    click.option(
        "--grace", "grace_s", type=Duration(), metavar="TIME",
        help="Time limit of the last dump after SIGTERM to the supervisor. Default: 2m.",
    ),
    on_event_option,
)  # fmt: skip
_NAMES = (
    "every", "to", "mtbf", "keep_last", "keep_hourly", "keep_daily", "rehearse", "key_file", "files",
    "output_timeout_s", "heartbeat", "heartbeat_timeout_s", "health", "health_every_s", "gpu_idle_s", "crashes",
    "crash_window_s", "max_restarts", "grace_s", "on_event",
)  # fmt: skip


def supervision_options(command: F) -> F:
    """Add the options. The command gets ``supervision``: a Supervision, or None if none of them was given.

    The store is opened, and made if missing.
    """

    @functools.wraps(command)
    def with_supervision(**options: Any) -> Any:
        given = {name: value for name in _NAMES if (value := options.pop(name, None)) is not None}
        return command(supervision=_supervision(given) if given else None, **options)

    for option in reversed(_OPTIONS):
        with_supervision = option(with_supervision)
    return cast("F", with_supervision)


def _supervision(given: dict[str, Any]) -> Supervision:
    from gpucr.supervise import settings, start  # all that supervisors need: other jobs start without it

    if "every" not in given or "to" not in given:
        raise click.UsageError("to supervise a job, give --every TIME (or auto) and --to STORE")
    every, place = given.pop("every"), given.pop("to")
    key_file = given.pop("key_file", None) or os.environ.get("GPUCR_KEY_FILE") or None
    key = given_key(key_file and Path(key_file))
    if key is not None and key_file is None:
        raise click.UsageError("a supervisor opens its store by itself after a boot: name a key file with --key-file")
    wanted = settings.Supervision(
        store="",
        every_s=None if every == "auto" else every,
        key_file=None if key_file is None else os.path.abspath(key_file),
        health=words_of(given.pop("health", "")),
        on_event=words_of(given.pop("on_event", "")),
        heartbeat=os.path.abspath(heartbeat) if (heartbeat := given.pop("heartbeat", None)) is not None else None,
        **{"mtbf_s" if name == "mtbf" else name: value for name, value in given.items()},
    )
    wanted.check()
    return structs.replace(wanted, store=start.require_store(place, key))
