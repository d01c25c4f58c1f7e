"""`gpucr hook`: GPU state of containers, through CRIU's action scripts."""

from __future__ import annotations

import os
from pathlib import Path

import click

from gpucr.cli.options import complete_folder, json_option
from gpucr.cli.output import print_json, say
from gpucr.cli.suggesting import SuggestingGroup
from gpucr.containers import criu_config
from gpucr.containers.action import run_hook
from gpucr.containers.criu_config import DEFAULT_FOLDER, RUNTIMES, Change, Runtime

_config_dir_option = click.option(
    "--config-dir",
    type=click.Path(path_type=Path, readable=False),  # whoever needs it reports what cannot be read
    default=DEFAULT_FOLDER,
    show_default=True,
    metavar="DIR",
    shell_complete=complete_folder,
    help="The folder of CRIU's configuration files.",
)


@click.group("hook", cls=SuggestingGroup)
def command() -> None:
    """Let container runtimes checkpoint and restore containers that use GPUs, without CRIU's CUDA plugin.

    The runtime calls CRIU as before, and CRIU calls gpucr: before it freezes the container, when it has written it, and
    when it has restored it. Containers without GPUs are left alone.

    \b
    Example:
      gpucr hook install
      podman container checkpoint --export /var/snapshots/web.tar web
    """


@command.command("install")
@click.option(
    "--runtime",
    type=click.Choice(RUNTIMES),
    help="Whose CRIU should call gpucr; criu means every CRIU of this machine. Default: runc, crun, and what uses "
    "them (podman, containerd, CRI-O).",
)
@_config_dir_option
@click.option("--force", is_flag=True, help="Proceed although others than root can change what CRIU will run as root.")
@json_option
def install(*, runtime: Runtime | None, config_dir: Path, force: bool, as_json: bool) -> None:
    """Add gpucr to CRIU's configuration files. Needs root.

    Other settings stay. Running it again changes nothing, or updates an older installation.

    \b
    Example:
      gpucr hook install --runtime runc
    """
    _tell("hook.install", criu_config.install(runtime, config_dir, force=force), as_json=as_json)


@command.command("uninstall")
@_config_dir_option
@json_option
def uninstall(*, config_dir: Path, as_json: bool) -> None:
    """Remove gpucr from CRIU's configuration files. Needs root.

    Afterwards the runtime cannot restore a container that used a GPU when it was checkpointed.

    \b
    Example:
      gpucr hook uninstall
    """
    _tell("hook.uninstall", criu_config.uninstall(config_dir), as_json=as_json)


@command.command("status")
@_config_dir_option
@json_option
def status(*, config_dir: Path, as_json: bool) -> None:
    """Show which configuration files name the hook. Exit code 1 if it is not in effect.

    \b
    Example:
      gpucr hook status --json
    """
    found = criu_config.status(config_dir)
    if as_json:
        print_json(
            "hook.status",
            {
                "installed": found.is_installed,
                "script": str(found.script),
                "current": found.is_current,
                "configured": [str(path) for path in found.configured],
            },
        )
    else:
        for path in found.configured:
            click.echo(f"{path}: calls {found.script}")
        if not found.configured:
            click.echo(f"no file in {config_dir} calls gpucr")
        elif not found.is_current:
            say(f"warning: {found.script} is missing, or starts another gpucr than this one")
            say("hint:  gpucr hook install")
    if not found.is_installed:
        raise SystemExit(1)


@command.command("run", short_help="Do the work of one hook, for CRIU.")
def run() -> None:
    """Do the work of one hook, which CRIU's environment variables name.

    The script that `gpucr hook install` writes does the same and starts faster. A failure makes CRIU fail; the
    container stays as it was, or is ended if it was being restored.

    \b
    Example (in CRIU's configuration, as a script of one's own):
      exec gpucr hook run
    """
    for line in run_hook(os.environ):
        say(line)


def _tell(kind: str, changes: tuple[Change, ...], *, as_json: bool) -> None:
    if as_json:
        print_json(kind, {"changes": changes})
        return
    for change in changes:
        click.echo(f"{change.path}: {change.what}")
