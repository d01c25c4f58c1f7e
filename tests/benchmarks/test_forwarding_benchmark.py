"""What forwarding costs: the benchmark measures what it says, also with thousands of connections."""

from __future__ import annotations

import pytest

from gpucr.linux import descriptor_limit
from tests.benchmarks.whole import results_of
from tests.storm import long

CONNECTIONS = 10_000


@long
@pytest.mark.root
@pytest.mark.usefixtures("sim_only")
def test_thousands_of_idle_connections_keep_nothing_but_a_little_memory() -> None:
    found = results_of("forwarding", "--gb", "0.01", "--rounds", "1", "--connections", CONNECTIONS)
    assert [each["way"] for each in found["ways"]] == ["direct", "plain loop", "gpucr"]
    assert all(each["gb_per_s"] > 0 for each in found["ways"])
    (idle,) = found["idle"]  # it waits for the job to sleep
    assert idle["connections"] >= min(CONNECTIONS, (descriptor_limit.most() - 1000) // 2)
    assert idle["memory_mib"] < 64 + idle["connections"] * 32 / 1024
