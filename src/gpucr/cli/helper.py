"""`gpucr helper`: root's CRIU for the jobs of ordinary users, behind a socket."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from gpucr.cli.criu import find_or_fetch
from gpucr.cli.options import complete_folder, json_option
from gpucr.cli.output import print_json, say
from gpucr.cli.suggesting import SuggestingGroup
from gpucr.helper import client
from gpucr.helper.access import SOCKET, socket_path
from gpucr.linux.reachable import closed_to_others
from gpucr.linux.unit_files import UNITS_FOLDER, UnitFile, what_is_left
from gpucr.privileged import copied_criu, installed, listener
from gpucr.privileged.folders import WORK_FOLDER
from gpucr.privileged.keys import KEYS_FOLDER
from gpucr.privileged.served import Settings

_units_dir_option = click.option(
    "--units-dir",
    type=click.Path(path_type=Path),
    default=UNITS_FOLDER,
    show_default=True,
    metavar="DIR",
    shell_complete=complete_folder,
    help="The folder of the unit files.",
)
_keys_option = click.option(
    "--keys",
    type=click.Path(path_type=Path),
    default=KEYS_FOLDER,
    show_default=True,
    metavar="DIR",
    shell_complete=complete_folder,
    help="The folder of root's keys.",
)
_group_option = click.option("--group", metavar="GROUP", help="Only users of this group may use it.")


@click.group("helper", cls=SuggestingGroup)
def command() -> None:
    """Let ordinary users dump and restore their own jobs with root's CRIU, and start them in sandboxes.

    Off until root installs it. It works only on processes that are wholly the user's, and restores only what it has
    dumped itself. A gpucr without privileges uses it by itself. Read the threat model first.

    \b
    Example:
      sudo gpucr helper install --group trainers
    """


@command.command("install")
@_group_option
@_units_dir_option
@_keys_option
@click.option("--no-enable", is_flag=True, help="Write the files only; start and enable nothing.")
@json_option
def install(*, group: str | None, units_dir: Path, keys: Path, no_enable: bool, as_json: bool) -> None:
    """Make root's key and systemd's units, and start the socket. Needs root.

    The helper has a copy of root's CRIU, which is fetched if there is none. Run it again after installing a newer gpucr
    or CRIU. For machines that restore each other's snapshots copy
    /etc/gpucr/helper/own.key of each to the others, under another name that ends in .key.

    \b
    Example:
      sudo gpucr helper install --group trainers
    """
    listener.require_root()
    criu = find_or_fetch()
    found = installed.install(criu, units_dir, keys=keys, group=group, enable=not no_enable)
    _print("install", found, as_json=as_json)
    _say_if_closed()
    if (left := what_is_left(units_dir, enable=not no_enable)) is not None:
        say(f"warning: {left}; without systemd run `gpucr helper listen`")


@command.command("uninstall")
@_units_dir_option
@json_option
def uninstall(*, units_dir: Path, as_json: bool) -> None:
    """Remove the units. Requests at work finish; keys stay. Needs root.

    \b
    Example:
      sudo gpucr helper uninstall
    """
    _print("uninstall", installed.uninstall(units_dir), as_json=as_json)


@command.command("status")
@json_option
def status(*, as_json: bool) -> None:
    """Show whether this user can use the helper, and its CRIU. Exit code 1 if there is none.

    \b
    Example:
      gpucr helper status
    """
    path = socket_path()
    install = client.find_helper() if path is not None else None
    if as_json:
        version = install.version_text if install is not None else None
        print_json("helper.status", {"socket": None if path is None else str(path), "criu_version": version})
    elif install is None:
        click.echo("there is no helper for this user (root installs one: gpucr helper install)")
    else:
        click.echo(f"the helper listens at {path}, with CRIU {install.version_text}")
    if install is None:
        raise SystemExit(1)


@command.command("listen")
@click.option(
    "--socket",
    "path",
    type=click.Path(path_type=Path),
    default=SOCKET,
    show_default=True,
    metavar="PATH",
    help="Where to listen.",
)
@_group_option
@_keys_option
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    default=WORK_FOLDER,
    show_default=True,
    metavar="DIR",
    shell_complete=complete_folder,
    help="Where images are copied to while a restore reads them.",
)
def listen(*, path: Path, group: str | None, keys: Path, work: Path) -> None:
    """Serve requests until SIGTERM, without systemd. Makes root's key if there is none. Needs root.

    \b
    Example:
      sudo gpucr helper listen --group trainers
    """
    listener.require_root()
    installed.make_key(keys)
    copied_criu.place(find_or_fetch())
    listener.listen(path, Settings(keys, work), group=group, on_ready=lambda: say(f"listening at {path}"))


def _print(action: str, files: list[UnitFile], *, as_json: bool) -> None:
    if as_json:
        print_json(f"helper.{action}", {"changes": [{"path": each.path, "what": each.what} for each in files]})
        return
    for each in files:
        click.echo(f"{each.what:9}  {each.path}")


def _say_if_closed() -> None:
    """Warn root if ordinary users cannot start the gpucr that was set up for them: Python or the package is private."""
    closed: Path | None = None
    with contextlib.suppress(OSError):
        closed = closed_to_others((Path(sys.executable), Path(__file__)))
    if closed is not None:
        say(f"warning: ordinary users cannot start this gpucr: they may not read {closed}")
        say(
            "hint:  install it where they can, with a Python that is not in a home folder: /usr/bin/python3 -m venv DIR"
        )
