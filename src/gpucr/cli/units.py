"""Warnings of what systemd will do to a job that has just been started, restored or supervised."""

from __future__ import annotations

from gpucr.cli.output import say
from gpucr.linux import service_units
from gpucr.supervise.service import why_not_drained


def warn_of_our_end() -> None:
    """Say so if systemd ends the job as soon as this command has returned."""
    if (unit := service_units.ends_with_us()) is not None:
        say(f"warning: systemd ends the job when this command returns: give {unit} KillMode=process")


def warn_of_shutdowns(pid: int | None) -> None:
    """Say so if the installed service cannot drain the job with this process."""
    if pid is not None and (why := why_not_drained(pid)) is not None:
        say(f"warning: {why}")
