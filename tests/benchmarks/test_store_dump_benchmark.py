"""The benchmark of dumps into a store: what its times come to, and that it runs as a whole on the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import store_dump
from benchmarks.store_dump import Result
from tests.benchmarks.whole import results_of
from tests.storm import long


def test_rates_are_relative_to_the_plain_folder() -> None:
    plain = Result({"dump": [2.0, 9.0, 1.0], "restore": [4.0]})
    store = Result({"dump": [2.5, 2.5, 2.5], "restore": [2.0], "again": [1.0]}, failures=["round 2: lost"])
    data = store_dump.as_json({"folder": plain, "auto": store}, {"gib": 8.0})
    assert data["ways"]["folder"]["medians"] == {"dump": 2.0, "restore": 4.0}
    assert data["ways"]["auto"]["of_folder"] == {"dump": 0.8, "restore": 2.0}
    assert data["ok"] is False
    assert store_dump.as_json({"auto": store}, {})["ways"]["auto"]["of_folder"] == {}


@long
@pytest.mark.criu
def test_it_runs_on_the_simulated_driver(sim_only: None, tmp_path: Path) -> None:
    small = ("--gib", "0.008", "--warm-gib", "0", "--rounds", "1")
    ways = results_of("store-dump", *small, "--ways", "folder,auto+encrypted", "--to", tmp_path)["ways"]
    assert ways["folder"]["medians"].keys() == ways["auto+encrypted"]["of_folder"].keys() == set(store_dump.MEASURED)
    counts = ways["auto+encrypted"]["counts"]
    assert counts["again"]["written_bytes"] < counts["dump"]["written_bytes"]
    assert list(tmp_path.iterdir()) == []
