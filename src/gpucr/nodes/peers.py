"""Which connections of a part lead to other parts of the job: those whose other end one of them has."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpucr.errors import JobChanged, Unsupported
from gpucr.linux.own_addresses import own_addresses
from gpucr.linux.sock_diag import TcpSocket
from gpucr.model import Connection
from gpucr.network.lock import IN_FLIGHT
from gpucr.nodes.meeting import Meeting
from gpucr.nodes.wire import MOST_TEXT
from gpucr.records import Record, Text, decode, encode

_NOBODY = -1


class Ends(Record, frozen=True):
    """The connections of a part that lead out of it. It is frozen, and they are blocked.

    ``ended`` are those that the other side has closed: it need not have its end any more. ``being_emptied``: its
    programs have closed these, and the other side has not got all of it. ``addresses`` are its node's.
    """

    connections: tuple[Connection, ...]
    ended: tuple[Connection, ...]
    being_emptied: tuple[Connection, ...]
    addresses: tuple[Text, ...]


class Owners(Record, frozen=True):
    """For each of the connections the node that has its other end; -1: none."""

    nodes: tuple[int, ...]


def find_peers(
    meeting: Meeting, leading_out: Sequence[TcpSocket], being_emptied: Sequence[Connection], deadline: float
) -> Mapping[Connection, int]:
    """Tell the other nodes, which are frozen too then. Returns those that lead to one, with its number.

    Raises NodeFailed, DeadlineExceeded, JobChanged if data of a closed connection is under way between two parts;
    Unsupported if there are too many connections.
    """
    connections = tuple(dict.fromkeys(each.connection for each in leading_out))
    ended = tuple(dict.fromkeys(each.connection for each in leading_out if each.peer_has_closed))
    said = encode(Ends(connections, ended, tuple(being_emptied), own_addresses())).decode()
    if len(said) > MOST_TEXT:
        raise Unsupported(
            f"the part has {len(leading_out)} connections to others, too many to be compared with the other parts'",
            hint="close connections that are not needed; about 50000 can be compared",
        )
    heard = decode(meeting.exchange("frozen", said, match, deadline), Owners)
    return {each: node for each, node in zip(connections, heard.nodes, strict=True) if node != _NOBODY}


def match(said: Sequence[str]) -> list[str]:
    """From each node's `Ends`, by node, each node's `Owners`. Raises JobChanged, RecordError."""
    ends = [decode(each, Ends) for each in said]
    owners = {each: node for node, part in enumerate(ends) for each in part.connections}
    by_address = {address: node for node, part in enumerate(ends) for address in part.addresses}
    closing = {each for part in ends for each in part.being_emptied}
    for each in owners:
        if (other := Connection(each.remote, each.local)) in closing:
            raise JobChanged(
                f"the job has closed the connection from {other}, and its other end has not got all data yet",
                pids=(),
                hint="dump again when it has read it: this data is in no process, so no snapshot can have it",
                code=IN_FLIGHT,
            )

    def owner(node: int, each: Connection, ended: Collection[Connection]) -> int:
        found = owners.get(Connection(each.remote, each.local), _NOBODY)
        if found == _NOBODY and each in ended:
            found = by_address.get(each.remote.address, _NOBODY)
        return found if found != node else _NOBODY

    return [
        encode(Owners(tuple(owner(node, each, ended) for each in part.connections))).decode()
        for node, (part, ended) in enumerate((part, frozenset(part.ended)) for part in ends)
    ]
