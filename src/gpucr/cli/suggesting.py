"""Command groups that suggest similar names for an unknown command."""

from __future__ import annotations

import click

_MEANT = {
    "checkpoint": ("suspend", "dump"),
    "freeze": ("suspend",),
    "thaw": ("resume",),
    "list": ("jobs", "ps", "ls"),
    "snapshots": ("ls",),
    "start": ("run",),
    "delete": ("rm",),
    "remove": ("rm",),
}
"""Words used by similar tools."""


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
            meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            ctx.fail(f"No such command {name!r}.{meant}")
        return super().resolve_command(ctx, args)
