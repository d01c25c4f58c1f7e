"""Which connections of a part lead to other parts of the job: those whose other end one of them has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpucr.errors import Unsupported
from gpucr.model import Connection
from gpucr.nodes.meeting import Meeting
from gpucr.nodes.wire import MOST_TEXT
from gpucr.records import Record, decode, encode

_NOBODY = -1


class Ends(Record, frozen=True):
    """The connections of a part that lead out of it. It is frozen, and they are blocked."""

    connections: tuple[Connection, ...]


class Owners(Record, frozen=True):
    """For each of the connections the node that has its other end; -1: none."""

    nodes: tuple[int, ...]


def find_peers(meeting: Meeting, leading_out: Sequence[Connection], deadline: float) -> Mapping[Connection, int]:
    """Tell the other nodes, which are frozen too then. Returns those that lead to one, with its number.

    Raises NodeFailed, DeadlineExceeded, Unsupported if there are too many connections.
    """
    said = encode(Ends(tuple(leading_out))).decode()
    if len(said) > MOST_TEXT:
        raise Unsupported(
            f"the part has {len(leading_out)} connections to others, too many to be compared with the other parts'",
            hint="close connections that are not needed; about 50000 can be compared",
        )
    heard = decode(meeting.exchange("frozen", said, match, deadline), Owners)
    return {each: node for each, node in zip(leading_out, heard.nodes, strict=True) if node != _NOBODY}


def match(said: Sequence[str]) -> list[str]:
    """From each node's `Ends`, by node, each node's `Owners`. Raises RecordError."""
    ends = [decode(each, Ends).connections for each in said]
    owners = {each: node for node, connections in enumerate(ends) for each in connections}

    def owner(node: int, each: Connection) -> int:
        found = owners.get(Connection(each.remote, each.local), _NOBODY)
        return found if found != node else _NOBODY

    return [
        encode(Owners(tuple(owner(node, each) for each in connections))).decode()
        for node, connections in enumerate(ends)
    ]
