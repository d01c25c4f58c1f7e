"""What the doctor says about connections, from facts, and how it finds these."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpucr.checkups import network
from gpucr.checkups.network import NetworkFacts
from gpucr.criu.install import CriuInstall
from gpucr.linux import nftables
from gpucr.model import Connection, Endpoint
from gpucr.network.records import KeptRecord
from tests.checkups.judging import only, severities
from tests.own_network import own_network

FACTS = NetworkFacts("nftables", "", is_privileged=True)
WITHOUT = NetworkFacts(None, "nftables: Operation not permitted", is_privileged=False)
CRIU = CriuInstall(("/usr/sbin/criu",), (4, 2, 1), "path", Path("/usr/sbin/criu"))
CONNECTION = Connection(Endpoint("10.0.0.1", 6379), Endpoint("2001:db8::1", 40000))
KEPT = KeptRecord("gpucr-kept-1", "nftables", 1, "/srv/s", "2026-11-26T01:02:03+00:00", (CONNECTION,))


def test_packets_can_be_blocked() -> None:
    assert severities(network.check(FACTS, CRIU)) == ["ok"]


def test_they_cannot() -> None:
    one = only(network.check(replace(FACTS, method=None, why_not="no nftables"), CRIU))
    assert (one.severity, one.evidence) == ("warning", "no nftables")


def test_for_a_user() -> None:
    """It matters where CRIU may dump connections for him."""
    assert network.check(WITHOUT, None) == []
    assert only(network.check(WITHOUT, CRIU)).severity == "unknown"
    assert only(network.check(WITHOUT, replace(CRIU, origin="helper"))).severity == "warning"


def test_kept_connections_are_listed_with_a_remedy() -> None:
    one = only(network.check(replace(FACTS, kept=(KEPT,)), CRIU))
    assert one.what == "1 connection of /srv/s kept since 2026-11-26T01:02:03+00:00"
    assert "gpucr connections --close gpucr-kept-1" in one.remedy


@pytest.mark.root
def test_a_filter_that_a_killed_criu_has_left() -> None:
    with own_network(), nftables.opened() as connection:
        nftables.make(connection, "CRIU-4711", comment="left", owned=False)
        facts = network.look()
        assert facts.method == "nftables"
        assert facts.foreign == ("CRIU-4711",)
    one = only(network.check(replace(facts, kept=()), CRIU))
    assert "nft delete table inet CRIU-4711" in one.remedy


def test_many_left_filters_are_one_finding() -> None:
    several = replace(FACTS, kept=(), foreign=("CRIU", *(f"CRIU-{number}" for number in range(20))))
    tables, chain = [each for each in network.check(several, CRIU) if each.severity == "warning"]
    assert "20 packet filters" in tables.what
    assert "CRIU-19" in tables.evidence
    assert "nft delete table inet CRIU-0`, and so on" in tables.remedy
    assert "iptables" in chain.remedy
