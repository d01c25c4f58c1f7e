"""What dump and restore of a part have in common: the way into the meeting, and the report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gpucr.errors import InvalidRequest
from gpucr.nodes.guest import Guest
from gpucr.nodes.host import Host
from gpucr.nodes.rendezvous import Rendezvous
from gpucr.nodes.wire import Hello
from gpucr.operations.dump import DumpReport
from gpucr.operations.restore import RestoreReport
from gpucr.store.opened import Store
from gpucr.store.stored_snapshot import SetPart
from gpucr.undo.cancellation import Cancellation
from gpucr.version import __version__

TIMEOUT_S = 600.0
"""A job that stands still because another node does nothing runs again after so long."""


@dataclass(frozen=True)
class PartReport:
    """What became of this node's ``part`` of the set ``name``: ``report`` is that of its dump or restore.

    ``seconds``: from the moment at which all nodes were there.
    """

    part: SetPart
    name: str
    report: DumpReport | RestoreReport = field(repr=False)
    seconds: float


def meeting_for(
    rendezvous: Rendezvous, action: str, store: Store, name: str, cancel: Cancellation | None
) -> Host | Guest:
    """This node's side of the meeting. Raises NodeFailed."""
    subject = f"{store.config.store_id.hex()}#{name}"
    hello = Hello(rendezvous.node, rendezvous.node_count, action, subject, __version__)
    return Host(rendezvous, hello, cancel) if rendezvous.node == 0 else Guest(rendezvous, hello, cancel)


def require_limit(timeout_s: float) -> None:
    """Raises InvalidRequest for a time limit that is none."""
    if not timeout_s > 0:
        raise InvalidRequest(f"the time limit of {timeout_s:g} s is not positive", hint="give seconds above zero")


def left_s(deadline: float) -> float:
    """How long it is until then; a moment at least, so that what is begun says itself that it was too late."""
    return max(0.001, deadline - time.monotonic())
