"""``gpucr criu``: which CRIU is used, whether it works here, and fetching one."""

from __future__ import annotations

import click

from gpucr.cli.options import json_option
from gpucr.cli.output import print_json, say
from gpucr.criu.engine import Criu
from gpucr.criu.install import CriuInstall, find_criu
from gpucr.errors import CriuError, CriuUnavailable


@click.command("criu")
@click.option("--no-fetch", is_flag=True, help="Only look; fetch nothing where none is found.")
@json_option
def command(*, no_fetch: bool, as_json: bool) -> None:
    """Show the CRIU that gpucr uses: its path, version and origin, and whether it works here; fetch it where missing.

    Looked for in this order: the path in GPUCR_CRIU, `criu` on PATH, the one that was fetched before. CRIU 4.1 or newer
    is needed, 4.2 on Linux 6.16 and newer. Where there is none, the distribution's signed packages are taken from the
    machine's own mirror (or from the Debian mirror that GPUCR_DEBIAN_MIRROR names) and unpacked below
    $XDG_DATA_HOME/gpucr; nothing is installed. Exit code 4 where there is no CRIU that works.

    \b
    Example:
      gpucr criu
    """
    install = _find(fetch=not no_fetch)
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
