"""The script that locks a running job again and again: on the simulated driver it runs as a whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from gpucr.driver.cuda import CudaDriver
from tests.hardware import gang_lock
from tests.hardware.programs import rank_place
from tests.ranks import RanksFactory


def test_it_locks_a_simulated_job_and_reports_how(sim_only: None, tmp_path: Path) -> None:
    words = ["--program", "sim", "--ranks", "3", "--times", "4", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "tests/hardware/gang_lock.py", *words],
        cwd=gang_lock.ROOT, env={**os.environ, "PYTHONPATH": "src"}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "out" / "gang_lock.json").read_text())
    assert (told["ok"], told["locks"], told["ranks"]) == (True, 4, 3)
    assert told["seconds_max"] >= told["seconds_median"] > 0
    assert [row["number"] for row in told["rows"]] == [1, 2, 3, 4]


class _Running:
    """What `lock_once` needs of a job."""

    def __init__(self, pid: int) -> None:
        self.pid = pid


def test_a_failed_lock_is_reported_and_the_job_continues(ranks: RanksFactory, driver: CudaDriver) -> None:
    job = ranks(2)
    job.pause(0)
    job.wait_standstill()
    row = gang_lock.lock_once(_Running(job.pid), 1, 2, 0.3)  # type: ignore[arg-type]
    assert not row.ok
    assert "still had GPU work pending" in row.detail
    job.go_on(0)
    job.assert_goes_on()


def test_ranks_sharing_gpus_claim_different_hosts() -> None:
    assert [rank_place.place(rank, 2, 2) for rank in range(2)] == [(0, {}), (1, {})]
    placed = [rank_place.place(rank, 4, 2) for rank in range(4)]
    assert [gpu for gpu, _ in placed] == [0, 1, 0, 1]
    assert [settings["NCCL_HOSTID"] for _, settings in placed] == ["host-0", "host-0", "host-1", "host-1"]
