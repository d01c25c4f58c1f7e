"""The benchmark of little changes runs as a whole on the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.incremental import PARTS_OF_A_SIZE, SHARES
from tests.benchmarks.whole import results_of
from tests.storm import long


@long
@pytest.mark.criu
def test_sizes_and_shares(sim_only: None, tmp_path: Path) -> None:
    small = ("--gib", "0.125", "--small-gib", "0.0625", "--unique-gib", "0.03125")
    rows = results_of("incremental", *small, "--only", "sizes,shares", "--to", tmp_path)["rows"]
    sizes = {(row["way"], row["gib"]) for row in rows if row["what"] == "sizes"}
    assert {gib for way, gib in sizes if way == "now"} == {0.125 * part for part in PARTS_OF_A_SIZE}
    assert max(gib for way, gib in sizes if way == "plain driver") == 0.0625
    moved = {(row["way"], row["changed"]): row["moved_bytes"] for row in rows if row["what"] == "shares"}
    for way in ("today", "now"):
        each = [moved[way, share] for share in SHARES]
        assert each == sorted(each)
        assert each[0] < each[-1]
    assert list(tmp_path.iterdir()) == []
