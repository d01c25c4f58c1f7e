"""Connections between the parts of a job on several nodes, when one part is restored."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from gpucr.model import Connection, moved


class Between(Struct, frozen=True):
    """What a restore of one part of a job on several nodes does about the others.

    ``connections`` to them, as they were, are taken up again once the caller says that all
    parts are there. ``addresses``: new ones of nodes, by the old ones.
    """

    connections: tuple[Connection, ...]
    addresses: Mapping[str, str]

    def now(self) -> tuple[Connection, ...]:
        """The connections at their new addresses."""
        return tuple(
            Connection(moved(each.local, self.addresses), moved(each.remote, self.addresses))
            for each in self.connections
        )
