"""The benchmark of little changes runs as a whole on the simulator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.incremental import PARTS_OF_A_SIZE, SHARES
from tests.storm import long

ROOT = Path(__file__).parents[2]


@long
@pytest.mark.criu
def test_sizes_and_shares(sim_only: None, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "incremental", "--gib", "0.125", "--small-gib", "0.0625"]
    done = subprocess.run(
        [*command, "--unique-gib", "0.03125", "--only", "sizes,shares", "--to", str(tmp_path), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    sizes = {(row["way"], row["gib"]) for row in rows if row["what"] == "sizes"}
    assert {gib for way, gib in sizes if way == "now"} == {0.125 * part for part in PARTS_OF_A_SIZE}
    assert max(gib for way, gib in sizes if way == "plain driver") == 0.0625
    moved = {(row["way"], row["changed"]): row["moved_bytes"] for row in rows if row["what"] == "shares"}
    for way in ("today", "now"):
        each = [moved[way, share] for share in SHARES]
        assert each == sorted(each)
        assert each[0] < each[-1]
    assert list(tmp_path.iterdir()) == []
