"""``gpucr criu``: which CRIU is used, whether it works here, fetching one, and granting it to ordinary users."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import click

from gpucr.cli.options import json_option
from gpucr.cli.output import print_json, say
from gpucr.criu import granted
from gpucr.criu.engine import Criu
from gpucr.criu.install import ENVIRONMENT_VARIABLE, CriuInstall, find_criu
from gpucr.errors import CriuError, CriuUnavailable, InvalidRequest
from gpucr.linux.reachable import closed_to_others


@click.command("criu")
@click.option("--no-fetch", is_flag=True, help="Only look; do not fetch one.")
@click.option("--grant", is_flag=True, help="Let ordinary users dump and restore their own jobs. Root only.")
@click.option("--group", metavar="GROUP", help="With --grant: only users of this group.")
@click.option("--network", is_flag=True, help="With --grant and --group: also jobs with TCP connections.")
@click.option("--revoke", is_flag=True, help="Revoke what --grant gave. Root only.")
@json_option
def command(*, no_fetch: bool, grant: bool, group: str | None, network: bool, revoke: bool, as_json: bool) -> None:
    """Show the CRIU that gpucr uses: path, version, origin, and whether it works here. Fetch one if there is none.

    The order is: GPUCR_CRIU, for ordinary users the one that root has granted, `criu` on PATH, the one fetched before.
    gpucr needs CRIU 4.1 or newer, 4.2 on Linux 6.16 and newer. It is fetched as signed packages of the distribution,
    from the machine's mirror (or GPUCR_DEBIAN_MIRROR), and unpacked below $XDG_DATA_HOME/gpucr; nothing is installed.
    Exit code 4: no CRIU works.

    --grant puts a copy with the capability CAP_CHECKPOINT_RESTORE into /opt/gpucr/criu. With it every user can dump and
    restore their own processes, and no others. What only root can dump is refused. A second copy, made with --network
    for one group, also has CAP_NET_ADMIN: its users could also change the machine's network.

    \b
    Example:
      gpucr criu
      sudo gpucr criu --grant --group gpu-users
      sudo gpucr criu --grant --network --group trainers
      sudo gpucr criu --revoke
    """
    if grant and revoke:
        raise InvalidRequest("--grant and --revoke exclude each other", hint="give one of them")
    if (group is not None or network) and not grant:
        name = "--group" if group is not None else "--network"
        raise InvalidRequest(f"{name} goes with --grant", hint="add --grant, or omit it")
    if revoke:
        say("\n".join(f"removed {path}" for path in granted.revoke()) or "nothing was granted")
    if grant:
        granted.grant(_find(fetch=not no_fetch), group=group, network=network)
        say_if_closed()
    install = _find(fetch=not no_fetch)
    problem = _problem(install)
    grants = granted.find_grants()
    if as_json:
        print_json(
            "criu",
            {
                "path": str(install.path),
                "command_line": list(install.command),
                "version": install.version_text,
                "origin": install.origin,
                "works": problem is None,
                "problem": None if problem is None else problem.message,
                "granted": [{"path": str(e.path), "group": e.group, "network": e.network} for e in grants],
            },
        )
    else:
        click.echo(f"path     {install.path}")
        click.echo(f"version  {install.version_text}")
        click.echo(f"origin   {install.origin}")
        click.echo(f"works    {'yes' if problem is None else f'no: {problem.message}'}")
        for line in map(_granted_text, grants or (None,)):
            click.echo(f"granted  {line}")
    if problem is not None:
        raise CriuUnavailable(problem.message, hint=problem.hint) from problem


def say_if_closed() -> None:
    """Warn root if ordinary users cannot start the gpucr that was set up for them: Python or the package is private."""
    closed: Path | None = None
    with contextlib.suppress(OSError):
        closed = closed_to_others((Path(sys.executable), Path(__file__)))
    if closed is not None:
        say(f"warning: ordinary users cannot start this gpucr: they may not read {closed}")
        say(
            "hint:  install it where they can, with a Python that is not in a home folder: /usr/bin/python3 -m venv DIR"
        )


def _granted_text(there: granted.Grant | None) -> str:
    if there is None:
        return "no: only root can dump and restore"
    to = "every user" if there.group is None else f"group {there.group}"
    return f"to {to}{', for TCP connections too' if there.network else ''}, in {there.path}"


def _find(*, fetch: bool) -> CriuInstall:
    try:
        return find_criu()
    except CriuUnavailable:
        if not fetch or os.environ.get(ENVIRONMENT_VARIABLE):  # the one that it names is never replaced by another
            raise
    from gpucr.criu.provide import provide_criu  # rarely needed, and slow to import

    return provide_criu(on_event=say)


def _problem(install: CriuInstall) -> CriuError | None:
    try:
        Criu(install).check()
    except CriuError as e:
        return e
    return None
