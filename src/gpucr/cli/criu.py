"""``gpucr criu``: which CRIU is used, whether it works here, and fetching one."""

from __future__ import annotations

import os

import click

from gpucr.cli.options import json_option
from gpucr.cli.output import print_json, say
from gpucr.criu.engine import Criu
from gpucr.criu.install import ENVIRONMENT_VARIABLE, CriuInstall, find_criu
from gpucr.criu.provide import provide_criu
from gpucr.errors import CriuError, CriuUnavailable


@click.command("criu")
@click.option("--no-fetch", is_flag=True, help="Only look; do not fetch one.")
@json_option
def command(*, no_fetch: bool, as_json: bool) -> None:
    """Show the CRIU that gpucr uses, fetched if there is none: path, version, origin, and whether it works.

    The order is: GPUCR_CRIU, `criu` on PATH, the one fetched before. Ordinary users have root's (`gpucr helper`).
    gpucr needs CRIU 4.1 or newer, 4.2 on Linux 6.16 and newer. It is fetched as signed packages of the distribution,
    from the machine's mirror (or GPUCR_DEBIAN_MIRROR), and unpacked below $XDG_DATA_HOME/gpucr; nothing is installed.
    Exit code 4: no CRIU works.

    \b
    Example:
      gpucr criu
    """
    install = find_or_fetch(fetch=not no_fetch)
    problem = _problem(install)
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
            },
        )
    else:
        click.echo(f"path     {install.path}")
        click.echo(f"version  {install.version_text}")
        click.echo(f"origin   {install.origin}")
        click.echo(f"works    {'yes' if problem is None else f'no: {problem.message}'}")
    if problem is not None:
        raise CriuUnavailable(problem.message, hint=problem.hint) from problem


def find_or_fetch(*, fetch: bool = True) -> CriuInstall:
    """The CRIU in use; one is fetched if there is none. Raises CriuUnavailable."""
    try:
        return find_criu()
    except CriuUnavailable:
        if not fetch or os.environ.get(ENVIRONMENT_VARIABLE):  # the one that it names is never replaced by another
            raise
    return provide_criu(on_event=say)


def _problem(install: CriuInstall) -> CriuError | None:
    try:
        Criu(install).check()
    except CriuError as e:
        return e
    return None
