"""Connections: whether packets can be blocked while a job is saved, and what is blocked now."""

from __future__ import annotations

from msgspec import Struct

from gpucr.checkups import catalogue
from gpucr.checkups.checkup import ok
from gpucr.criu.install import CriuInstall
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.linux import capabilities
from gpucr.network import kept, of_criu
from gpucr.network.filters import Method, Namespace, find_method
from gpucr.network.records import KeptRecord
from gpucr.quantities import counted

_ABOUT = "connections"
_OF_CRIU = "CRIU"


class NetworkFacts(Struct, frozen=True):
    """``why_not``: why there is no ``method``. ``foreign``: filters of a CRIU that gpucr did not start."""

    method: Method | None
    why_not: str
    is_privileged: bool
    kept: tuple[KeptRecord, ...] = ()
    foreign: tuple[str, ...] = ()


def look() -> NetworkFacts:
    """Ask the packet filter, and read the records."""
    method, why_not = find_method()
    foreign: tuple[str, ...] = ()
    if method is not None:
        with Namespace() as own:
            foreign = tuple(sorted(of_criu.filters(own) - {record.name for record in kept.all_kept()}))
    is_privileged = capabilities.can_repair_sockets()
    return NetworkFacts(method, why_not, is_privileged, kept.all_kept(), foreign)


def check(facts: NetworkFacts, criu: CriuInstall | None) -> list[Finding]:
    """The packet filter, kept connections, and what others have left. ``criu``: None if there is none."""
    found = [*map(_kept, facts.kept), *_foreign(facts.foreign)]
    if facts.method is not None:
        return [ok(_ABOUT, f"packets can be blocked with {facts.method}", "asked the kernel"), *found]
    if facts.is_privileged:
        return [_none(facts), *found]
    return [*(_of_a_user(facts, criu) if criu is not None else ()), *found]


def _kept(record: KeptRecord) -> Finding:
    return catalogue.CONNECTIONS_KEPT.seen(
        f"{record.method}: {record.name}",
        connections=counted(len(record.connections), "connection"),
        snapshot=record.snapshot,
        created=record.created,
        name=record.name,
    )


def _foreign(names: tuple[str, ...]) -> list[Finding]:
    """One finding for all tables: every killed CRIU leaves another one."""
    tables = [name for name in names if name != _OF_CRIU]
    found = []
    if tables:
        what = f"a packet filter of CRIU's, {tables[0]}"
        remedy = (
            f"if no CRIU runs, and nothing that it dumped is to be restored here: `nft delete table inet {tables[0]}`"
        )
        if len(tables) > 1:
            what, remedy = f"{counted(len(tables), 'packet filter')} of CRIU's", f"{remedy}, and so on"
        found.append(_left(what, remedy, ", ".join(tables)))
    if _OF_CRIU in names:
        remedy = "if no CRIU runs: remove the chain CRIU with iptables"
        found.append(_left("a packet filter of CRIU's, the chain CRIU", remedy, "iptables"))
    return found


def _left(what: str, remedy: str, seen: str) -> Finding:
    return catalogue.FILTER_LEFT.seen(seen, what=what, remedy=remedy)


def _none(facts: NetworkFacts) -> Finding:
    return catalogue.NO_PACKET_FILTER.seen(facts.why_not)


def _of_a_user(facts: NetworkFacts, criu: CriuInstall) -> list[Finding]:
    if not criu.is_helpers:
        return [catalogue.PACKET_FILTER_NOT_SEEN.seen(facts.why_not)]
    return [catalogue.NOT_BLOCKED_FOR_USERS.seen(facts.why_not)]
