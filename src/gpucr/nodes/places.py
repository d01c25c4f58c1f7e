"""Where the parts of a set come back: addresses of the nodes, old and new, agreed on before anything starts."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from gpucr.errors import InvalidRequest, Unsupported
from gpucr.linux.sock_diag import is_local_address
from gpucr.model import Endpoint
from gpucr.nodes.meeting import Meeting
from gpucr.records import Record, decode, encode
from gpucr.snapshot.manifest import Manifest

AUTO: Literal["auto"] = "auto"
AddressMap = Mapping[str, str] | Literal["auto"]
"""New addresses by old ones, or ``auto``: a part's only address becomes the one by which the others reach its node."""

_PROBE_S = 1.0
_MOST_PROBED = 4


class Place(Record, frozen=True):
    """Where one part is restored: its addresses at the dump and now. ``given``: by ``--map``."""

    addresses: dict[str, str]
    given: dict[str, str]


class Moves(Record, frozen=True):
    """What all have agreed on: the new addresses by the old ones. ``of_parts``: those that parts had, moved or not."""

    of_parts: dict[str, str]
    addresses: dict[str, str]


def parse_map(words: Iterable[str]) -> AddressMap:
    """From ``auto``, or words ``OLD=NEW``; none: nothing moves. Raises InvalidRequest."""
    given = list(words)
    return AUTO if given == [AUTO] else _parsed(given)


def _parsed(words: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        old, _, new = word.partition("=")
        try:
            ends = ipaddress.ip_address(old), ipaddress.ip_address(new)
        except ValueError:
            raise _refused(
                f"--map {word} does not name two addresses", "give --map OLD=NEW for each node, or --map auto alone"
            ) from None
        if ends[0].version != ends[1].version:
            raise _refused(f"--map {word} leads from one version of IP to another", "sockets keep theirs")
        if found.setdefault(str(ends[0]), str(ends[1])) != str(ends[1]):
            raise _refused(f"--map names two addresses for {ends[0]}", "name one")
    return found


def agree(
    meeting: Meeting, manifest: Manifest, asked: AddressMap, deadline: float, *, force: bool = False
) -> dict[str, str]:
    """Compare with the other nodes. Returns the addresses that change, of all parts, by the old ones.

    Raises InvalidRequest if a part would have no address here, or another's; Unsupported if the job still runs at an
    old one; NodeFailed, DeadlineExceeded.
    """
    own = _own(manifest, asked, meeting.own_address)
    given = {} if asked == AUTO else dict(asked)
    heard = meeting.exchange("placed", encode(Place(own, given)).decode(), _merged, deadline)
    moves = decode(heard, Moves)
    for new in moves.of_parts.values():
        if new not in own.values() and is_local_address(new):
            raise _refused(
                f"the part of another node is to have {new}, an address of this machine",
                "restore each part where its address is, or name other addresses with --map",
            )
    if not force:
        _require_gone(manifest, [old for old in own if old not in moves.of_parts.values()])
    meeting.together("agreed", deadline)
    return {old: new for old, new in moves.addresses.items() if old != new}


def _own(manifest: Manifest, asked: AddressMap, reached_at: str | None) -> dict[str, str]:
    """This part's addresses, each with the one that it gets here."""
    old = manifest.addresses
    if asked == AUTO:
        moving = [each for each in old if each != reached_at]
        if not moving or reached_at is None:
            asked = {}
        elif len(old) > 1:
            raise _refused(
                f"the part has the addresses {', '.join(old)}, and --map auto knows one new address",
                "name each: --map OLD=NEW",
            )
        else:
            asked = _parsed([f"{old[0]}={reached_at}"])
    found = {each: asked.get(each, each) for each in old}
    for each, new in found.items():
        if not is_local_address(new):
            raise _refused(
                f"the part has the address {each}, and "
                + ("that" if each == new else f"{new}, which is to take its place,")
                + " is no address of this machine",
                "say where each part comes back: --map OLD=NEW for each node, or --map auto",
            )
    return found


def _merged(said: Sequence[str]) -> list[str]:
    """All places, for every node, if they fit together. Raises InvalidRequest."""
    parts = tuple(decode(each, Place) for each in said)
    new_by_old: dict[str, str] = {}
    old_by_new: dict[str, str] = {}
    for part in parts:
        for old, new in part.addresses.items():
            if new_by_old.setdefault(old, new) != new:
                raise _refused(
                    f"{old} was the address of several parts, which come back at {new_by_old[old]} and {new}",
                    "bring them back on one node",
                )
            if (other := old_by_new.setdefault(new, old)) != old:
                raise _refused(f"both {other} and {old} would become {new}", "give each an address of its own")
    of_parts = dict(new_by_old)
    for old, new in (each for part in parts for each in part.given.items()):
        if new_by_old.setdefault(old, new) != new:
            raise _refused(f"--map names {new_by_old[old]} and {new} for {old}", "give all nodes the same --map")
    answer = encode(Moves(of_parts, new_by_old)).decode()
    return [answer] * len(parts)


def _require_gone(manifest: Manifest, old: Sequence[str]) -> None:
    """Raise Unsupported if somebody accepts connections where the part had listened, and does not any more."""
    listened = [each for each in manifest.endpoints if each.address in old]
    anywhere = [each.port for each in manifest.endpoints if ipaddress.ip_address(each.address).is_unspecified]
    asked = [*listened, *(Endpoint(address, port) for address in old for port in anywhere)]
    for each in asked[:_MOST_PROBED]:
        if _accepts(each):
            raise Unsupported(
                f"a program still listens at {each}, where this part was: the job may run there",
                hint="end it first; --force insists",
                code="GPUCR-NODES-ADDRESS",
            )


def _accepts(end: Endpoint) -> bool:
    try:
        socket.create_connection((end.address, end.port), timeout=_PROBE_S).close()
    except OSError:
        return False
    return True


def _refused(what: str, hint: str) -> InvalidRequest:
    return InvalidRequest(what, hint=hint, code="GPUCR-NODES-ADDRESS")
