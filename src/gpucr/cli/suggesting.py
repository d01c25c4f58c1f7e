"""Groups of commands that say what may have been meant by a name that is none of them."""

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
"""Words of neighbouring tools."""


class SuggestingGroup(click.Group):
    """A group whose error for a mistyped command names those that are near."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it. Raises its usage error with what may have been meant."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            known = self.list_commands(ctx)
            import difflib  # only here

            near = [each for each in _MEANT.get(name, ()) if each in known] or difflib.get_close_matches(name, known)
            meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            ctx.fail(f"No such command {name!r}.{meant}")
        return super().resolve_command(ctx, args)
