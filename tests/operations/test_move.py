"""A running job moves to other GPUs, and stays where it was on failure."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.driver.gpus import gpu_processes
from gpucr.model import CudaState
from gpucr.sim import build as simulator
from tests import command
from tests.compiled import compiled_interposer
from tests.conftest import MakeMachine
from tests.counter import Counter, CounterFactory, wait_until
from tests.scenarios.test_killed import assert_goes_on, is_claimed, killed
from tests.storm import later, long, sample

pytestmark = pytest.mark.in_turn

RUNNING = CudaState.RUNNING


def places(job: Counter) -> dict[int, list[str]]:
    """The UUIDs of the GPUs on which each of its processes holds memory."""
    return {
        pid: sorted(use.gpu_uuid for use in gpu_processes() if use.pid == pid and use.used_bytes)
        for pid in job.processes()
    }


def test_a_job_moves_to_another_gpu_and_continues(
    machine: MakeMachine, counter: CounterFactory, driver: CudaDriver
) -> None:
    uuids = machine("2x256MiB")
    job = counter("--mib", "8", "--fork", "1")
    pids = job.processes()
    report = gpucr.move(job.pid, gpu="1")
    assert places(job) == {pid: [uuids[1]] for pid in pids}
    assert [(change.found, change.now) for change in report.processes] == [(RUNNING, RUNNING)] * 2
    assert [phase.name for phase in report.phases] == ["lock", "checkpoint", "move", "unlock"]
    assert_goes_on(job, driver, pids, 101)
    gpucr.move(job.pid, gpu_map="1=0")
    assert places(job) == {pid: [uuids[0]] for pid in pids}
    assert_goes_on(job, driver, pids, 102)


def test_two_gpus_are_swapped_though_neither_has_room_for_both(
    machine: MakeMachine, counter: CounterFactory, driver: CudaDriver
) -> None:
    uuids = machine("2x256MiB")
    job = counter("--mib", "175", "--devices", "0,1")
    report = gpucr.move(job.pid, gpu="1,0")
    assert report.gpu_map is not None
    assert dict(report.gpu_map.pairs) == {uuids[0]: uuids[1], uuids[1]: uuids[0]}
    assert_goes_on(job, driver, [job.pid], 101)


def test_a_job_already_there_is_left_alone(machine: MakeMachine, counter: CounterFactory) -> None:
    uuids = machine("2x256MiB")
    job = counter("--mib", "8", "--devices", "1")
    report = gpucr.move(job.pid, gpu="1")
    assert (report.phases, report.gpu_map) == ((), None)
    assert places(job) == {job.pid: [uuids[1]]}
    assert job.ask() == 101


def test_a_gpu_without_room_is_refused_before_anything_starts(machine: MakeMachine, counter: CounterFactory) -> None:
    uuids = machine("2x256MiB")
    job, other = counter("--mib", "100"), counter("--mib", "200", "--devices", "1")
    begun: list[str] = []
    with pytest.raises(gpucr.Unsupported, match=f"GPU {uuids[1]} has 48.0 MiB free"):
        gpucr.move(job.pid, gpu="1", on_progress=lambda progress: begun.append(progress.phase))
    assert begun == []
    assert (places(job), places(other)) == ({job.pid: [uuids[0]]}, {other.pid: [uuids[1]]})


@pytest.mark.parametrize("fault", ["checkpoint#1=801", "restore#1=999", "unlock#1=999"])
def test_a_failed_move_leaves_the_job_where_it_was(
    machine: MakeMachine, counter: CounterFactory, driver: CudaDriver, fault: str
) -> None:
    uuids = machine("2x256MiB")
    job = counter("--mib", "8", env={"GPUCR_SIM_FAULTS": fault})
    with pytest.raises(gpucr.DriverError):
        gpucr.move(job.pid, gpu="1")
    assert places(job) == {job.pid: [uuids[0]]}
    assert_goes_on(job, driver, [job.pid], 101)
    gpucr.move(job.pid, gpu="1")
    assert places(job) == {job.pid: [uuids[1]]}
    assert_goes_on(job, driver, [job.pid], 102)


@long
def test_if_one_of_two_cannot_move_the_other_returns(machine: MakeMachine, driver: CudaDriver, tmp_path: Path) -> None:
    """Each fills its GPU: the one that has moved occupies the other one's."""
    uuids = machine("2x256MiB")
    program = f"{simulator.build() / 'counter'} --port 0 --mib 350"
    ranks = [
        f"CUDA_VISIBLE_DEVICES=0 {program} > {tmp_path}/0 & ",
        f"CUDA_VISIBLE_DEVICES=1 GPUCR_SIM_FAULTS=restore#1=999 {program} > {tmp_path}/1 & ",
    ]
    with subprocess.Popen(["sh", "-c", "".join(ranks) + "wait"], start_new_session=True) as job:
        try:
            ready = [tmp_path / "0", tmp_path / "1"]
            wait_until(lambda: all(r.exists() and r.read_text().startswith("ready") for r in ready), "both ranks")
            before = {use.pid: use.gpu_uuid for use in gpu_processes()}
            assert sorted(before.values()) == sorted(uuids)
            with pytest.raises(gpucr.DriverError):
                gpucr.move(job.pid, gpu="1,0")
            assert {use.pid: use.gpu_uuid for use in gpu_processes()} == before
            assert {driver.state(pid) for pid in before} == {RUNNING}
            gpucr.move(job.pid, gpu="1,0")
            swapped = {uuids[0]: uuids[1], uuids[1]: uuids[0]}
            assert {use.pid: use.gpu_uuid for use in gpu_processes()} == {p: swapped[u] for p, u in before.items()}
        finally:
            os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.parametrize(("event", "phase", "there"), [
    later("end", "lock", False), ("end", "checkpoint", False), later("begin", "move", False), ("end", "move", True),
    later("begin", "unlock", True),
])  # fmt: skip
def test_gpucr_is_killed(
    machine: MakeMachine, counter: CounterFactory, driver: CudaDriver, event: str, phase: str, there: bool
) -> None:
    uuids = machine("2x256MiB")
    job = counter("--mib", "8", "--fork", "1")
    pids = job.processes()
    killed(event, phase, "move", job.pid)
    wait_until(lambda: not is_claimed(pids), "the guard to be done")
    assert places(job) == {pid: [uuids[there]] for pid in pids}
    assert_goes_on(job, driver, pids, 101)


def test_the_command_and_its_refusals(machine: MakeMachine, counter: CounterFactory) -> None:
    uuids = machine("2x256MiB")
    job = counter("--mib", "8")
    nowhere = command.run("move", job.pid)
    assert (nowhere.returncode, "give --gpu or --gpu-map" in nowhere.stderr) == (2, True)
    moved = command.run_json("move", job.pid, "--gpu", "1")
    assert moved["gpu_map"] == {uuids[0]: uuids[1], uuids[1]: uuids[0]}
    gpucr.suspend(job.pid)
    away = command.run("move", job.pid, "--gpu", "0")
    assert (away.returncode, "is suspended" in away.stderr, "gpucr resume" in away.stderr) == (2, True, True)


@pytest.fixture(scope="module")
def library() -> Path:
    return compiled_interposer()


@pytest.fixture
def interposed(counter: CounterFactory, library: Path, tmp_path: Path) -> Callable[..., Counter]:
    """A counter whose device memory can leave it."""

    def start(faults: str = "") -> Counter:
        variables = {"LD_PRELOAD": str(library), "GPUCR_INTERPOSER_DIR": str(tmp_path / "agents")}
        return counter("--mib", "24", env={**variables, "GPUCR_SIM_FAULTS": faults})

    return start


@pytest.mark.parametrize(
    ("peers", "faults"), sample([("1", ""), ("0", ""), ("1", "restore#1=999"), ("0", "unlock#3=999")], 3)
)
def test_memory_of_an_interposed_job_is_moved(
    machine: MakeMachine, interposed: Callable[..., Counter], driver: CudaDriver, monkeypatch: pytest.MonkeyPatch,
    peers: str, faults: str,
) -> None:  # fmt: skip
    """From GPU to GPU if they can reach each other, else through host memory."""
    uuids = machine("2x1GiB")
    monkeypatch.setenv("GPUCR_SIM_PEERS", peers)
    job, count = interposed(faults), 101

    def moved(gpu: int) -> subprocess.CompletedProcess[str]:
        """By a process of its own: the simulated driver remembers the machine on which one has started CUDA."""
        return command.run("move", job.pid, "--gpu", gpu, "-v")

    if faults:
        assert moved(1).returncode == 1
        assert_goes_on(job, driver, [job.pid], count)
        count += 1
    for gpu in (1, 0):
        was = places(job)
        done = moved(gpu)
        assert done.returncode == 0, done.stderr
        assert places(job) == {job.pid: [uuids[gpu]]}
        assert ("taken out by its interposer" in done.stderr) is (was != places(job))
        assert_goes_on(job, driver, [job.pid], count)
        count += 1


@pytest.mark.parametrize("peers", ["0", later("1")])
@pytest.mark.parametrize("phase", ["checkpoint", "move"])
def test_gpucr_is_killed_while_memory_is_away(
    machine: MakeMachine, interposed: Callable[..., Counter], driver: CudaDriver, monkeypatch: pytest.MonkeyPatch,
    peers: str, phase: str,
) -> None:  # fmt: skip
    uuids = machine("2x256MiB")
    monkeypatch.setenv("GPUCR_SIM_PEERS", peers)
    job = interposed()
    killed("end", phase, "move", job.pid)
    wait_until(lambda: not is_claimed([job.pid]), "the guard to be done")
    assert places(job) == {job.pid: [uuids[phase == "move"]]}
    assert_goes_on(job, driver, [job.pid], 101)
