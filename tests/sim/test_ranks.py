"""The simulator's collectives, and the program of ranks that wait for each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpucr.sim.build import build
from tests.counter import wait_until
from tests.ranks import RanksFactory
from tests.sim.libcuda import LOCKED, RUNNING, Libcuda

NOT_READY = 600


@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_sums_are_exact(ranks: RanksFactory, count: int) -> None:
    job = ranks(count, "--step-us", "1000", "--mib", "1")
    assert len(job.ranks) == count
    job.assert_goes_on(40)  # more than there are chunks in 1 MiB: all of it has been compared


def test_only_a_deleted_shared_mapping_is_left(ranks: RanksFactory) -> None:
    job = ranks(2)
    for pid in job.ranks:
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert f"/dev/shm/nccl-sim-{job.pid} (deleted)" in maps
    assert not Path(f"/dev/shm/nccl-sim-{job.pid}").exists()


@pytest.mark.parametrize("queue", [1, 4])
def test_a_rank_behind_locks_and_a_rank_ahead_stays_pending(ranks: RanksFactory, libcuda: Libcuda, queue: int) -> None:
    job = ranks(2, "--step-us", "1000", "--queue", str(queue))
    job.pause(0)
    job.wait_standstill()
    assert libcuda.lock(job.ranks[1], 50) == NOT_READY
    assert libcuda.state(job.ranks[1]) == (0, RUNNING)
    assert libcuda.lock(job.ranks[0], 5000) == 0
    assert libcuda.state(job.ranks[0]) == (0, LOCKED)
    assert libcuda.lock(job.ranks[1], 50) == NOT_READY
    assert libcuda.act("unlock", job.ranks[0]) == 0
    job.go_on(0)
    job.assert_goes_on()


def test_a_rank_runs_ahead_by_its_queue_depth(ranks: RanksFactory, libcuda: Libcuda) -> None:
    job = ranks(2, "--step-us", "1000", "--queue", "6")
    job.pause(0)
    job.wait_standstill()
    before = job.status(0).steps  # at most: the other one has submitted six more
    pending = threading.Thread(target=lambda: libcuda.lock(job.ranks[1], 60_000))
    pending.start()
    job.go_on(0)
    pending.join()
    assert libcuda.state(job.ranks[1]) == (0, LOCKED)
    job.wait_standstill()
    assert job.status(0).steps >= before + 6
    job.assert_exact(0)


def test_results_survive_a_checkpoint(ranks: RanksFactory, libcuda: Libcuda) -> None:
    job = ranks(1, "--step-us", "500", "--mib", "1")
    for _ in range(3):
        libcuda.suspend(job.ranks[0])
        before = job.status(0)
        libcuda.resume(job.ranks[0])
        job.assert_goes_on(40)
        assert job.status(0).steps > before.steps


def test_a_job_with_a_dead_rank_stalls(ranks: RanksFactory, libcuda: Libcuda) -> None:
    job = ranks(2, "--step-us", "1000", "--queue", "1")
    os.kill(job.ranks[0], signal.SIGKILL)
    wait_until(lambda: job.ranks[0] not in job.processes(), "the rank to end")
    job.wait_standstill()
    assert libcuda.lock(job.ranks[1], 50) == NOT_READY
    assert set(job.processes()) == {job.pid, job.ranks[1]}


def test_sigterm_ends_all(ranks: RanksFactory) -> None:
    job = ranks(3)
    os.kill(job.pid, signal.SIGTERM)
    job.reap()
    wait_until(lambda: not job.processes(), "the ranks to end")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["0", "--status-dir", "x"],
        ["257", "--status-dir", "x"],
        ["2"],
        ["2", "--status-dir"],
        ["2", "--status-dir", "x", "--queue", "0"],
        ["2", "--status-dir", "x", "--skew-percent", "101"],
        ["2", "--status-dir", "x", "--nonsense", "1"],
    ],
)
def test_wrong_usage(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [str(build() / "ranks"), *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ranks N --status-dir DIR")


def test_ranks_that_cannot_start_end_the_program(sim_only: None, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(build() / "ranks"), "2", "--status-dir", str(tmp_path), "--mib", "100"],
        env={**os.environ, "GPUCR_SIM_GPUS": "1x64MiB", "GPUCR_SIM_STATE": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "cuMemAlloc" in done.stderr


def test_the_command_becomes_the_program(sim_only: None, tmp_path: Path) -> None:
    """`gpucr sim ranks` becomes the program."""
    source = "from gpucr.cli.sim import command; command()"
    words = ["ranks", "2", "--status-dir", str(tmp_path), "--step-ms", "0.5", "--skew", "0", "--queue", "1"]
    with subprocess.Popen([sys.executable, "-c", source, *words], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline().startswith(f"ready pid={program.pid} ranks=")
        program.terminate()
        assert program.wait(30) == 0
    assert (tmp_path / "rank-001").read_text().startswith("rank=1 pid=")
