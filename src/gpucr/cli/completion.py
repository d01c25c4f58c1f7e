"""`gpucr completion`: shell completion for gpucr's commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from gpucr.errors import InvalidRequest

_VARIABLE = "_GPUCR_COMPLETE"  # what click makes of the name gpucr
_SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
def command(*, shell: str) -> None:
    """Print the script that makes SHELL complete gpucr: commands, options, job names, pids and files.

    \b
    Example:
      gpucr completion bash > /etc/bash_completion.d/gpucr
      gpucr completion zsh > "${fpath[1]}/_gpucr"
      gpucr completion fish > ~/.config/fish/completions/gpucr.fish
    """
    made = get_completion_class(shell)
    if made is None:
        raise InvalidRequest(f"click knows no completion for {shell}")
    root = click.get_current_context().find_root()
    click.echo(made(root.command, {}, "gpucr", _VARIABLE).source())
