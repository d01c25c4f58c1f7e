"""`gpucr service`: start supervised jobs after a boot, with systemd."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpucr.cli.options import complete_folder, json_option
from gpucr.cli.output import print_json, say
from gpucr.cli.suggesting import SuggestingGroup
from gpucr.linux.unit_files import what_is_left
from gpucr.supervise import service

if TYPE_CHECKING:
    from gpucr.linux.unit_files import UnitFile

_units_dir_option = click.option(
    "--units-dir",
    type=click.Path(path_type=Path),
    default="/etc/systemd/system",
    show_default=True,
    metavar="DIR",
    shell_complete=complete_folder,
    help="The folder of the unit files.",
)


@click.group("service", cls=SuggestingGroup)
def command() -> None:
    """Start supervised jobs after a boot, and drain them before a shutdown, with systemd.

    Without systemd, run `gpucr supervise --all` after a boot (cron: @reboot), and `gpucr supervise --all --drain`
    before a shutdown.

    \b
    Example:
      gpucr service install
    """


@command.command("install", short_help="Write the units, check and enable them.")
@_units_dir_option
@click.option("--no-enable", is_flag=True, help="Write the files only; start and enable nothing.")
@json_option
def install(*, units_dir: Path, no_enable: bool, as_json: bool) -> None:
    """Write the units, check them with systemd-analyze and enable them. Needs root.

    Running it again changes nothing, or updates older units.

    \b
    Example:
      gpucr service install
    """
    _print("install", service.install(units_dir, enable=not no_enable), as_json=as_json)
    if (left := what_is_left(units_dir, enable=not no_enable)) is not None:
        say(f"warning: {left}; without systemd run `gpucr supervise --all` after a boot")


@command.command("uninstall")
@_units_dir_option
@json_option
def uninstall(*, units_dir: Path, as_json: bool) -> None:
    """Remove the units. Running supervisors keep running. Needs root.

    \b
    Example:
      gpucr service uninstall
    """
    _print("uninstall", service.uninstall(units_dir), as_json=as_json)


@command.command("show")
@json_option
def show(*, as_json: bool) -> None:
    """Print the units.

    \b
    Example:
      gpucr service show
    """
    units = service.units()
    if as_json:
        print_json("service.show", {"units": dict(units)})
        return
    for name, text in units.items():
        click.echo(f"# {name}\n{text}")


def _print(action: str, files: Sequence[UnitFile], *, as_json: bool) -> None:
    if as_json:
        print_json(f"service.{action}", {"changes": [{"path": each.path, "what": each.what} for each in files]})
        return
    for each in files:
        click.echo(f"{each.what:9}  {each.path}")
