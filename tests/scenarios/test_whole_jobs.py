"""Whole jobs as users run them: started, dumped while they work, ended, restored here or on other GPUs, or cloned.

The ranks wait for each other on the GPU, as those of NCCL do, and one lost or doubled step shows in their sums. The
same on hardware, with torchrun: tests/hardware/whole_jobs.py.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.gpus import gpu_processes
from gpucr.linux import processes
from gpucr.sim import build as simulator
from tests import command
from tests.conftest import MakeMachine
from tests.counter import CounterFactory, processes_in, wait_until
from tests.ranks import Ranks
from tests.sandboxed import SandboxedCounter, start_counter
from tests.storm import later, sample

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("state_home")]


class Job(Ranks):
    """Ranks that `gpucr run` started, by the commands."""

    def __init__(self, folder: Path, count: int, *options: str) -> None:
        self.folder, self.count = folder, count
        self.status_dir = folder / "status"
        program = [str(simulator.build() / "ranks"), str(count), "--status-dir", str(self.status_dir)]
        work = ["--mib", "4", "--step-us", "2000"]
        started = command.run_json_before("run", "--name", "job", "--cwd", folder, *options, "--", *program, *work)
        self.is_isolated: bool = started["isolated"]
        log = Path(started["log"])
        wait_until(lambda: log.read_text().startswith("ready"), "all ranks to have done a step")

    def dump(self, to: Path) -> None:
        """Dump it, and look that it is gone."""
        self.assert_goes_on()
        command.run_json("dump", "job", "--to", to)
        wait_until(lambda: not processes_in(self.folder), "the dumped job to be gone")

    def places(self) -> list[str]:
        """The GPU of each rank, in order."""
        own = {processes.describe(pid).ns_pids[-1]: pid for pid in processes_in(self.folder)}
        held = {use.pid: use.gpu_uuid for use in gpu_processes()}
        return [held[own[self.status(rank).pid]] for rank in range(self.count)]


@pytest.mark.parametrize(
    ("gpus", "count", "options"),
    sample(
        [
            pytest.param("2x512MiB", 2, ["--isolate"], id="two"),
            pytest.param("4x512MiB", 4, ["--isolate"], id="four"),
            pytest.param("2x512MiB", 8, ["--isolate"], id="eight on two GPUs"),
            pytest.param("2x512MiB", 2, ["--isolate", "--network", "host"], id="on the machine's network"),
            pytest.param("2x512MiB", 2, ["--no-isolate"], id="in the machine's namespaces"),
        ],
        4,
    ),
)
def test_a_job_is_dumped_while_it_works_and_loses_nothing(
    machine: MakeMachine, folder: Path, tmp_path: Path, gpus: str, count: int, options: list[str]
) -> None:
    uuids = machine(gpus)
    job = Job(folder, count, *options)
    assert job.is_isolated == ("--isolate" in options)
    assert job.places() == [uuids[rank % len(uuids)] for rank in range(count)]
    for cycle in range(2):
        job.dump(tmp_path / f"s{cycle}")
        restored = command.run_json("restore", tmp_path / f"s{cycle}")
        assert restored["name"] == "job"
        job.assert_goes_on()
        assert job.places() == [uuids[rank % len(uuids)] for rank in range(count)]


@pytest.mark.parametrize("option", ["--isolate", later("--no-isolate")])
def test_two_ranks_swap_gpus(machine: MakeMachine, folder: Path, tmp_path: Path, option: str) -> None:
    uuids = machine("2x512MiB")
    job = Job(folder, 2, option)
    job.dump(tmp_path / "s")
    restored = command.run_json("restore", tmp_path / "s", "--gpu-map", "0=1,1=0")
    assert restored["gpu_map"] == {uuids[0]: uuids[1], uuids[1]: uuids[0]}
    job.assert_goes_on()
    assert job.places() == uuids[::-1]
    command.run_json("suspend", "job")
    command.run_json("resume", "job", "--gpu-map", "1=0")
    job.assert_goes_on()
    assert job.places() == uuids


def test_a_job_finds_free_gpus_by_itself(
    machine: MakeMachine, counter: CounterFactory, folder: Path, tmp_path: Path
) -> None:
    uuids = machine("4x512MiB")
    job = Job(folder, 2)
    for rank in range(2):
        assert job.status(rank).memory == "ok"
    job.dump(tmp_path / "s")
    fillers = [counter("--mib", "500", "--devices", gpu) for gpu in ("0", "2")]
    refused = command.run("restore", tmp_path / "s")
    assert refused.returncode == 3
    assert f"GPU {uuids[0]} has 4.0 MiB free" in refused.stderr
    assert not processes_in(folder)
    restored = command.run_json("restore", tmp_path / "s", "--gpu", "auto")
    assert "it has 4.0 MiB free" in " ".join(restored["gpu_reasons"])
    job.assert_goes_on()
    assert sorted(job.places()) == sorted([uuids[3], uuids[1]])
    assert all(filler.send("verify") == "ok" for filler in fillers)


def test_one_warm_process_becomes_two_on_two_gpus(machine: MakeMachine, folder: Path, tmp_path: Path) -> None:
    uuids = machine("2x512MiB")
    with start_counter(folder, "--mib", "64", name="model") as model:
        assert model.ask() == 101
        command.run_json("dump", "model", "--to", tmp_path / "s")
    with contextlib.ExitStack() as opened:
        clones = []
        for gpu in (0, 1):
            name = f"model-on-{gpu}"
            report = command.run_json("restore", tmp_path / "s", "--clone", "--name", name, "--gpu", gpu)
            clones.append(opened.enter_context(SandboxedCounter(report["pid"], model.port)))
        held = {use.pid: use.gpu_uuid for use in gpu_processes()}
        assert [held[clone.pid] for clone in clones] == uuids
        assert [clone.ask() for clone in clones] == [102, 102]
        assert [clone.send("verify") for clone in clones] == ["ok", "ok"]
        listed = {job["name"]: job["state"] for job in command.run_json("jobs")["jobs"]}
        assert listed == {"model": "dumped", "model-on-0": "running", "model-on-1": "running"}


def test_an_unrestorable_job_is_refused_and_keeps_running(
    machine: MakeMachine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process on two GPUs that reach each other: a checkpoint would succeed, and every restore fail."""
    machine("2x512MiB")
    monkeypatch.setenv("GPUCR_SIM_PEERS", "1")
    with start_counter(folder, "--devices", "0,1", name="peers", interpose=False) as job:
        refused = command.run("dump", "peers", "--to", tmp_path / "s")
        assert refused.returncode == 3, refused.stderr
        assert "hint:  " in refused.stderr
        assert not (tmp_path / "s").exists()
        assert job.ask() == 101
        assert gpucr.list_jobs()[0].state.word == "running"
