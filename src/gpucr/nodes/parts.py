"""Common parts of a node's dump and restore: joining the meeting, and the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

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
from gpucr.undo.operation import Terms
from gpucr.version import __version__

TIMEOUT_S = 600.0
"""A job that is stopped because another node does not respond runs again after this time."""


Report = TypeVar("Report", DumpReport, RestoreReport)


@dataclass(frozen=True)
class PartReport(Generic[Report]):
    """The result for this node's ``part`` of the set ``name``: ``report`` is its dump's or restore's.

    ``seconds``: from the moment at which all nodes were there.
    """

    part: SetPart
    name: str
    report: Report = field(repr=False)
    seconds: float


def meeting_for(
    rendezvous: Rendezvous, action: str, store: Store, name: str, cancel: Cancellation | None
) -> Host | Guest:
    """This node's side of the meeting. Raises NodeFailed."""
    subject = f"{store.config.store_id.hex()}#{name}"
    hello = Hello(rendezvous.node, rendezvous.node_count, action, subject, __version__)
    return Host(rendezvous, hello, cancel) if rendezvous.node == 0 else Guest(rendezvous, hello, cancel)


def required_limit(terms: Terms) -> float:
    """The time limit in seconds. Raises InvalidRequest for an invalid one."""
    timeout_s = TIMEOUT_S if terms.timeout_s is None else terms.timeout_s
    if not timeout_s > 0:
        raise InvalidRequest(f"the time limit of {timeout_s:g} s is not positive", hint="give seconds above zero")
    return timeout_s
