"""Unrestorable jobs are refused and keep running; force and measurements on this machine override that."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.diagnosis.canaries.canary import Canary
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import DriverError, Unsupported
from gpucr.model import CudaState
from tests.command import run
from tests.counter import Counter, CounterFactory

FAR = 1e9
"""A deadline (time.monotonic()) that no test reaches."""


@pytest.fixture(autouse=True)
def machine_with_peers(sim_only: None, state_home: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two GPUs that reach each other, and nothing measured yet."""
    monkeypatch.setenv("GPUCR_SIM_PEERS", "1")
    return monkeypatch


@pytest.fixture(scope="module")
def nccl_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library of NCCL's name that does nothing: what is looked at is that it is mapped."""
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "nccl.c").write_text("int nccl;\n")
    library = folder / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "nccl.c"], check=True)
    return str(library)


@pytest.fixture
def nccl_job(counter: CounterFactory, nccl_library: str) -> Counter:
    """Two processes with NCCL loaded, in its default setting, on two GPUs."""
    return counter("--fork", "1", "--no-shm", "--devices", "0,1", "--mib", "2", env={"LD_PRELOAD": nccl_library})


def test_a_default_nccl_job_is_refused_with_the_reason_and_keeps_running(nccl_job: Counter, driver: CudaDriver) -> None:
    assert nccl_job.ask() == 101
    with pytest.raises(
        Unsupported, match=r"2 processes \(\d+, \d+\) may exchange data through NCCL over P2P"
    ) as caught:
        gpucr.suspend(nccl_job.pid)
    assert "NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0" in (caught.value.hint or "")
    assert [driver.state(pid) for pid in nccl_job.processes()] == [CudaState.RUNNING] * 2
    assert nccl_job.ask() == 102


def test_the_command_says_so_with_exit_code_3(nccl_job: Counter) -> None:
    done = run("suspend", nccl_job.pid)
    assert done.returncode == 3
    assert "through NCCL over P2P" in done.stderr
    assert "--force" in done.stderr
    assert nccl_job.ask() == 101


@pytest.mark.criu
def test_a_dump_is_refused_too_and_a_dry_run_shows_it(nccl_job: Counter, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="through NCCL over P2P"):
        gpucr.dump(nccl_job.pid, tmp_path / "snapshot")
    assert not (tmp_path / "snapshot").exists()
    done = run("dump", nccl_job.pid, "--to", tmp_path / "snapshot", "--dry-run", "--json")
    assert done.returncode == 3, done.stderr
    findings = json.loads(done.stdout)["findings"]
    whats = [finding["what"] for finding in findings if finding["severity"] == "blocking"]
    assert "through NCCL over P2P" in whats[0]
    assert ["may use peer access" in what for what in whats[1:3]] == [True, True]
    assert ["over CUDA IPC" in what for what in whats[3:]] == [True]
    assert run("dump", nccl_job.pid, "--to", tmp_path / "snapshot", "--dry-run").returncode == 3
    assert run("dump", nccl_job.pid, "--to", tmp_path / "snapshot", "--dry-run", "--force").returncode == 0
    assert nccl_job.ask() == 101


def test_settings_that_can_be_restored_are_not_refused(counter: CounterFactory, nccl_library: str) -> None:
    settings = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0"}
    program = counter("--fork", "1", "--mib", "2", env={"LD_PRELOAD": nccl_library, **settings})
    assert gpucr.suspend(program.pid).warnings == ()
    gpucr.resume(program.pid)
    assert program.ask() == 101


def test_a_process_on_two_gpus_is_refused_until_peer_access_is_measured_to_be_restored(
    counter: CounterFactory, machine_with_peers: pytest.MonkeyPatch
) -> None:
    program = counter("--devices", "0,1", "--mib", "2")
    with pytest.raises(Unsupported, match=r"may use peer access .*not measured on this machine"):
        gpucr.suspend(program.pid)
    gpucr.probe(["peer_access"], canary_timeout_s=1800)
    with pytest.raises(Unsupported, match=r"peer_access measured on this machine on [\d-]{10}: lost"):
        gpucr.suspend(program.pid)
    machine_with_peers.setenv("GPUCR_SIM_DRIVER", "future")
    with pytest.raises(Unsupported, match="not measured on this machine"):
        gpucr.suspend(program.pid)
    gpucr.probe(["peer_access"], canary_timeout_s=1800)
    gpucr.suspend(program.pid)
    gpucr.resume(program.pid)
    assert program.send("verify") == "ok"


def test_gpus_without_peer_access(counter: CounterFactory, machine_with_peers: pytest.MonkeyPatch) -> None:
    machine_with_peers.setenv("GPUCR_SIM_PEERS", "0")
    program = counter("--devices", "0,1", "--mib", "2")
    assert gpucr.suspend(program.pid).warnings == ()
    gpucr.resume(program.pid)
    assert program.send("verify") == "ok"


def test_overriding_with_force(counter: CounterFactory) -> None:
    """Two GPUs, but nothing was copied between them: it comes back, and the report says what was overruled."""
    program = counter("--devices", "0,1", "--mib", "2")
    report = gpucr.suspend(program.pid, force=True)
    assert len(report.warnings) == 1
    assert "may use peer access" in report.warnings[0]
    gpucr.resume(program.pid)
    assert program.send("verify") == "ok"
    done = run("suspend", program.pid, "--force")
    assert (done.returncode, "warning: process" in done.stderr) == (0, True)
    gpucr.resume(program.pid)


@pytest.fixture
def peers() -> Iterator[Canary]:
    """A process that copies between its two GPUs with peer access."""
    with Canary("peer_access", FAR) as canary:
        canary.wait_ready()
        yield canary


def test_the_reason_of_the_refusal(peers: Canary, driver: CudaDriver) -> None:
    with pytest.raises(Unsupported, match="may use peer access"):
        gpucr.suspend(peers.pid)
    assert peers.ask() is None
    gpucr.suspend(peers.pid, force=True)
    for code in (1, 304):
        with pytest.raises(DriverError) as caught:
            gpucr.resume(peers.pid)
        assert caught.value.result == code
    assert driver.state(peers.pid) is CudaState.CHECKPOINTED, "lost"


@pytest.mark.criu
def test_overridden_findings_are_in_the_snapshot_and_the_error(counter: CounterFactory, tmp_path: Path) -> None:
    program = counter("--devices", "0,1", "--mib", "2", env={"GPUCR_SIM_FAULTS": "restore#1=999"})
    gpucr.dump(program.pid, tmp_path / "s", force=True)
    program.reap()
    (overruled,) = gpucr.Snapshot.open(tmp_path / "s").manifest.overruled
    seen = f"process {program.pid} (counter) holds memory on 2 GPUs that may use peer access"
    assert overruled.finding.startswith(seen)
    assert f"overruled   {seen}" in run("inspect", tmp_path / "s").stdout
    with pytest.raises(DriverError) as caught:
        gpucr.restore(tmp_path / "s")
    assert f"--force had overruled: {seen}" in str(caught.value.hint)
    assert overruled.consequence in str(caught.value.hint)


def test_a_mig_gpu(counter: CounterFactory, machine_with_peers: pytest.MonkeyPatch) -> None:
    program = counter("--mib", "2")
    machine_with_peers.setenv("GPUCR_SIM_MIG", "1")
    with pytest.raises(Unsupported, match=r"is partitioned \(MIG\)"):
        gpucr.suspend(program.pid)
    assert program.ask() == 101


@pytest.mark.criu
def test_a_machine_measured_to_restore_nothing(
    counter: CounterFactory, tmp_path: Path, machine_with_peers: pytest.MonkeyPatch
) -> None:
    program = counter("--mib", "2")
    gpucr.dump(program.pid, tmp_path / "snapshot")
    program.reap()
    machine_with_peers.setenv("GPUCR_SIM_FAULTS", "restore=999")
    gpucr.probe(["plain"], canary_timeout_s=1800)
    with pytest.raises(Unsupported, match="does not bring back even a plain CUDA program"):
        gpucr.restore(tmp_path / "snapshot")
    assert not program.alive
