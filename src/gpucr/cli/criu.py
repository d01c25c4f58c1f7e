"""``gpucr criu``: which CRIU is used, whether it works here, fetching one, and granting it to ordinary users."""

from __future__ import annotations

import click

from gpucr.cli.options import json_option
from gpucr.cli.output import print_json, say
from gpucr.criu import granted
from gpucr.criu.engine import Criu
from gpucr.criu.install import CriuInstall, find_criu
from gpucr.errors import CriuError, CriuUnavailable, InvalidRequest


@click.command("criu")
@click.option("--no-fetch", is_flag=True, help="Only look; fetch nothing where none is found.")
@click.option("--grant", is_flag=True, help="Let ordinary users dump and restore jobs of their own. Root only.")
@click.option("--group", metavar="GROUP", help="With --grant: only users of this group.")
@click.option("--network", is_flag=True, help="With --grant and --group: jobs with TCP connections, too.")
@click.option("--revoke", is_flag=True, help="Take back what --grant gave. Root only.")
@json_option
def command(*, no_fetch: bool, grant: bool, group: str | None, network: bool, revoke: bool, as_json: bool) -> None:
    """Show the CRIU that gpucr uses: its path, version and origin, and whether it works here; fetch it where missing.

    Looked for in this order: the path in GPUCR_CRIU, for ordinary users the one that root has granted, `criu` on PATH,
    the one that was fetched before. CRIU 4.1 or newer is needed, 4.2 on Linux 6.16 and newer. Where there is none, the
    distribution's signed packages are taken from the machine's own mirror (or from the Debian mirror that
    GPUCR_DEBIAN_MIRROR names) and unpacked below $XDG_DATA_HOME/gpucr; nothing is installed. Exit code 4 where there is
    no CRIU that works.

    --grant puts a copy into /opt/gpucr/criu that has the capability CAP_CHECKPOINT_RESTORE by its file. With it each
    user can dump and restore processes of their own, and no others. What only root can dump is refused. A second copy,
    made with --network for one group, has CAP_NET_ADMIN as well: its users could also change the machine's network.

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
        raise InvalidRequest(f"{name} goes with --grant", hint="add --grant, or leave it out")
    if revoke:
        say("\n".join(f"removed {path}" for path in granted.revoke()) or "nothing was granted")
    if grant:
        granted.grant(_find(fetch=not no_fetch), group=group, network=network)
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


def _granted_text(there: granted.Grant | None) -> str:
    if there is None:
        return "no: only root can dump and restore"
    to = "every user" if there.group is None else f"group {there.group}"
    return f"to {to}{', for TCP connections too' if there.network else ''}, in {there.path}"


def _find(*, fetch: bool) -> CriuInstall:
    try:
        return find_criu()
    except CriuUnavailable:
        if not fetch:
            raise
    from gpucr.criu.provide import provide_criu  # rarely needed, and it is not light

    return provide_criu(on_event=say)


def _problem(install: CriuInstall) -> CriuError | None:
    try:
        Criu(install).check()
    except CriuError as e:
        return e
    return None
