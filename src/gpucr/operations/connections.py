"""Connections that dumps have kept for a restore on this machine."""

from __future__ import annotations

from gpucr.errors import InvalidRequest
from gpucr.network import kept
from gpucr.network.lock import explained
from gpucr.network.records import KeptRecord
from gpucr.undo.cancellation import Cancellation
from gpucr.undo.operation import all_or_nothing


def list_kept() -> tuple[KeptRecord, ...]:
    """What is kept, oldest first. Needs root, whose dumps keep connections."""
    return tuple(sorted(kept.all_kept(), key=lambda record: record.created))


def close_kept(name: str, *, cancel: Cancellation | None = None) -> KeptRecord:
    """Give up the connections of a record, or of a snapshot: the other ends get a reset. Returns what was kept.

    Raises InvalidRequest, Unsupported.
    """
    with all_or_nothing("close", name, cancel) as interrupts:
        found = [record for record in kept.all_kept() if name in (record.name, record.snapshot)]
        if not found:
            raise InvalidRequest(
                f"no connections are kept under {name}", hint="`gpucr connections` lists what is kept on this machine"
            )
        interrupts.conclude()
        with explained("cannot be released"):
            kept.give_up(found[0])
        return found[0]
