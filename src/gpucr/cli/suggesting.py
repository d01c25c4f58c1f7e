"""Command groups that suggest similar names for an unknown command."""

from __future__ import annotations

import click

_MEANT = {
    "checkpoint": ("suspend", "dump"),
    "save": ("dump",),
    "freeze": ("suspend",),
    "pause": ("suspend",),
    "thaw": ("resume",),
    "unfreeze": ("resume",),
    "unpause": ("resume",),
    "load": ("restore",),
    "clone": ("restore",),
    "migrate": ("move",),
    "list": ("jobs", "ps", "ls"),
    "status": ("jobs", "state"),
    "snapshots": ("ls",),
    "show": ("inspect",),
    "info": ("inspect",),
    "init": ("store",),
    "start": ("run",),
    "attach": ("logs",),
    "end": ("stop",),
    "delete": ("rm",),
    "remove": ("rm",),
    "check": ("doctor", "verify"),
}
"""Words used by similar tools."""
_OPTIONS = {"help": "--help", "version": "--version"}
"""Of git and others, commands."""


class NoSuchCommand(click.UsageError):
    """``hint``: what may have been meant."""

    hint: str | None = None


class SuggestingGroup(click.Group):
    """A group whose error for a mistyped command suggests similar ones."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Like click's, but the usage error has suggestions."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            known = self.list_commands(ctx)
            import difflib  # only here

            near = [each for each in _MEANT.get(name, ()) if each in known] or difflib.get_close_matches(name, known)
            error = NoSuchCommand(f"there is no command {name!r}", ctx)
            if name in _OPTIONS:
                error.hint = f"`{ctx.command_path} {' '.join([*args[1:2], _OPTIONS[name]])}`"
            elif near:
                error.hint = f"did you mean {' or '.join(near)}?"
            raise error
        return super().resolve_command(ctx, args)
