"""Device memory that the driver itself hands over (custom storage), on the simulated driver 615: there was no other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import gpucr
from gpucr.criu.engine import Criu
from gpucr.driver.cuda import CudaDriver
from gpucr.driver.gpus import gpu_processes
from gpucr.errors import CriuError, CustomStorageError, DriverError, IllegalState, SnapshotError, Unsupported
from gpucr.gpu_state.custom_storage import carrier, suspended
from gpucr.gpu_state.custom_storage.client import Carrier
from gpucr.gpu_state.custom_storage.messages import Answer, Ask
from gpucr.interposer.library import installed, preload_path
from gpucr.linux import memory, own_python
from gpucr.model import CudaState, DevicePart
from gpucr.snapshot.device.folder_sink import FolderSink
from gpucr.undo.events import Progress
from tests import command
from tests.conftest import MakeMachine
from tests.counter import Counter, CounterFactory
from tests.memory_cgroup import ENTER, limited
from tests.storm import later, long

RUNNING, CHECKPOINTED = CudaState.RUNNING, CudaState.CHECKPOINTED

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("sim_only"), pytest.mark.in_turn]


@pytest.fixture(autouse=True)
def driver_615(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUCR_SIM_DRIVER", "615")


@pytest.fixture
def job(counter: CounterFactory) -> Counter:
    """Two processes with memory on two GPUs, of a size that is not of whole pages."""
    return counter("--mib", "5", "--devices", "0,1", "--fork", "1")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The requests to carriers from now on, each with its process; also unlocks of the driver."""
    seen: list[tuple[str, int]] = []
    ask, unlock = Carrier.ask, CudaDriver.unlock

    def asking(carrier: Carrier, what: Ask, descriptors: Sequence[int] = ()) -> Answer:
        seen.append((what.what, what.pid))
        return ask(carrier, what, descriptors)

    def unlocking(driver: CudaDriver, pid: int) -> None:
        seen.append(("unlock", pid))
        unlock(driver, pid)

    monkeypatch.setattr(Carrier, "ask", asking)
    monkeypatch.setattr(CudaDriver, "unlock", unlocking)
    return seen


def kinds(report: gpucr.DumpReport) -> set[str]:
    return {data.kind for data in report.snapshot.manifest.device_parts.values()}


def assert_runs(job: Counter, driver: CudaDriver, pids: list[int], expected: int) -> None:
    assert job.processes() == pids
    assert {driver.state(pid) for pid in pids} == {RUNNING}
    assert job.ask() == expected
    assert job.send("verify") == "ok"
    assert not any(keeps(pid) for pid in pids)


def keeps(pid: int) -> bool:
    return "gpucr-custom" in Path(f"/proc/{pid}/maps").read_text()


def in_order(asked: list[tuple[str, int]], pids: list[int], *what: str) -> None:
    """Assert that all processes finish one action before the next begins for any."""
    told = [name for name, pid in asked if pid in pids and name in what]
    assert told == [name for name in what for _ in pids], asked


# --- dump and restore --------------------------------------------------------------------------------------------


@pytest.mark.criu
@pytest.mark.parametrize("place", ["folder", later("store"), later("encrypted")])
def test_dump_and_restore(
    place: str, job: Counter, driver: CudaDriver, tmp_path: Path, asked: list[tuple[str, int]]
) -> None:
    to, key, pids = tmp_path / "s", None, job.processes()
    if place != "folder":
        key = gpucr.Secret.passphrase("a good passphrase") if place == "encrypted" else None
        gpucr.init_store(to, key=key) if key is not None else gpucr.init_store(to)
    report = gpucr.dump(job.pid, to, key=key)
    assert kinds(report) == {"custom_storage"}
    assert [each.gpu for each in report.snapshot.manifest.device_parts[DevicePart(pids[0])].extents] == [
        gpu.uuid for gpu in report.snapshot.manifest.gpus
    ]
    # Into a folder, which can be read again until it is a snapshot, the bytes go straight from the GPUs.
    assert (("copy", pids[0]) in asked) == (place != "folder")
    in_order(asked, pids, "checkpoint", *(["saved"] if place == "folder" else []), "complete")
    assert any("a simulated driver only" in warning for warning in report.warnings)
    del asked[:]
    job.reap()
    gpucr.restore(report.snapshot.where, key=key)
    in_order(asked, pids, "take_back", "complete", "unlock")
    assert_runs(job, driver, pids, 101)


@pytest.mark.criu
@pytest.mark.parametrize(
    ("persist", "host_bytes"), [("background", 1 << 40), later("background", 0), later("sync", 1 << 40)]
)
def test_a_job_left_running(
    persist: str,
    host_bytes: int,
    job: Counter,
    driver: CudaDriver,
    tmp_path: Path,
    asked: list[tuple[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory is in host memory while it is saved; if that has no room, the job waits for the disk."""
    pids = job.processes()
    monkeypatch.setattr(memory, "available_bytes", lambda pid=None: host_bytes)
    report = gpucr.dump(job.pid, tmp_path / "s", leave_running=True, persist=persist, force=True)  # type: ignore[arg-type]
    assert kinds(report) == {"custom_storage"}
    assert (("copy", pids[0]) in asked) == (persist == "background" and host_bytes > 0)
    assert_runs(job, driver, pids, 101)
    monkeypatch.undo()
    monkeypatch.setenv("GPUCR_SIM_DRIVER", "615")
    job.kill()
    job.reap()
    gpucr.restore(tmp_path / "s")
    assert_runs(job, driver, pids, 101)


@pytest.mark.criu
def test_a_frozen_job_is_saved_and_thawed(job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    pids = job.processes()
    with gpucr.freeze(job.pid) as frozen:
        assert not [use for use in gpu_processes() if use.pid in pids]
        for name in ("a", "b"):
            assert kinds(frozen.save(tmp_path / name)) == {"custom_storage"}
    assert_runs(job, driver, pids, 101)


@pytest.mark.criu
def test_memory_is_restored_on_another_gpu(
    machine: MakeMachine, counter: CounterFactory, driver: CudaDriver, tmp_path: Path
) -> None:
    """By processes of their own: the simulated driver remembers the machine on which one has started CUDA."""
    uuids = machine("2x2GiB")
    job = counter("--mib", "8")
    assert command.run("dump", job.pid, "--to", tmp_path / "s", "--gpu-state", "custom").returncode == 0
    job.reap()
    assert command.run("restore", tmp_path / "s", "--gpu", "1").returncode == 0
    assert {use.gpu_uuid for use in gpu_processes() if use.pid == job.pid} == {uuids[1]}
    assert_runs(job, driver, [job.pid], 101)
    assert command.run("suspend", job.pid).returncode == 0
    assert keeps(job.pid)
    assert command.run("resume", job.pid, "--gpu", "0").returncode == 0
    assert {use.gpu_uuid for use in gpu_processes() if use.pid == job.pid} == {uuids[0]}
    assert_runs(job, driver, [job.pid], 102)


# --- suspend and resume ------------------------------------------------------------------------------------------


def test_a_suspended_process_holds_its_own_memory(
    job: Counter, driver: CudaDriver, asked: list[tuple[str, int]], tmp_path: Path
) -> None:
    pids = job.processes()
    for expected in (101, 102):
        gpucr.suspend(job.pid)
        in_order(asked, pids, "checkpoint", "complete")
        assert {driver.state(pid) for pid in pids} == {CHECKPOINTED}
        assert all(keeps(pid) for pid in pids)
        assert not [use for use in gpu_processes() if use.pid in pids]
        listed = {each.process.pid: each for each in gpucr.job_states(job.pid)}
        with pytest.raises(IllegalState) as raised:
            gpucr.Process(job.pid).restore()
        assert "what left by custom storage comes back by that alone" in (raised.value.hint or "")
        assert all(listed[pid].resident_bytes >= 10 << 20 for pid in pids), "what it keeps is host memory"
        del asked[:]
        gpucr.resume(job.pid)
        in_order(asked, pids, "restore", "complete", "unlock")
        assert_runs(job, driver, pids, expected)
        del asked[:]


@pytest.mark.criu
def test_a_suspended_job_is_dumped_and_restored_suspended(job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    pids = job.processes()
    gpucr.suspend(job.pid)
    gpucr.dump(job.pid, tmp_path / "running", leave_running=True)
    assert all(keeps(pid) for pid in pids)
    report = gpucr.dump(job.pid, tmp_path / "s")
    assert kinds(report) == {"custom_storage"}
    job.reap()
    gpucr.restore(tmp_path / "s")
    assert {driver.state(pid) for pid in pids} == {CHECKPOINTED}
    gpucr.resume(job.pid)
    assert_runs(job, driver, pids, 101)


def test_a_dump_counts_memory_held_by_a_suspended_process(
    job: Counter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That memory is written, but is not resident."""
    gpucr.suspend(job.pid)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "free_disk_bytes", lambda folder: (64 + 8) << 20)
        blocking = [each for each in gpucr.plan_dump(job.pid, tmp_path / "s").findings if each.severity == "blocking"]
    assert [each.code for each in blocking] == ["GPUCR-NO-SPACE"], blocking
    gpucr.resume(job.pid)


def test_a_resume_without_custom_storage_changes_nothing(
    job: Counter, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver alone would restore a process that has nothing to be restored from."""
    pids = job.processes()
    gpucr.suspend(job.pid)
    monkeypatch.setenv("GPUCR_SIM_DRIVER", "580")
    begun: list[Progress] = []
    with pytest.raises(Unsupported, match="this machine's driver has no custom storage") as raised:
        gpucr.resume(job.pid, on_progress=begun.append)
    assert raised.value.code == "GPUCR-BACKEND"
    assert not begun
    assert {driver.state(pid) for pid in pids} == {CHECKPOINTED}
    monkeypatch.setenv("GPUCR_SIM_DRIVER", "615")
    gpucr.resume(job.pid)
    assert_runs(job, driver, pids, 101)


# --- what fails --------------------------------------------------------------------------------------------------


@pytest.mark.criu
@pytest.mark.parametrize("host_bytes", [0, later(1 << 40)])
@pytest.mark.parametrize("what", ["criu", "disk"])
def test_a_dump_that_fails_leaves_the_job_running(
    what: str, host_bytes: int, job: Counter, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory comes back out of the files of the snapshot, or where they have not all of it, from host memory."""
    pids = job.processes()

    def not_dumped(*_: object, **__: object) -> object:
        raise CriuError("it does not want to", phase="dump")

    def disk_is_full(*_: object) -> bytes:
        raise SnapshotError("the disk is full", path="s")

    monkeypatch.setattr(*{"criu": (Criu, "dump", not_dumped), "disk": (FolderSink, "put", disk_is_full)}[what])
    monkeypatch.setattr(memory, "available_bytes", lambda pid=None: host_bytes)
    with pytest.raises((CriuError, SnapshotError)):
        gpucr.dump(job.pid, tmp_path / "s", force=True)
    assert not (tmp_path / "s").exists()
    assert_runs(job, driver, pids, 101)


@pytest.mark.parametrize(
    ("fault", "result"), [("checkpoint=801", 801), ("checkpoint#1=999", 999), ("complete#1=999", 999)]
)
def test_a_suspend_the_driver_refuses_is_undone(
    fault: str, result: int, counter: CounterFactory, driver: CudaDriver
) -> None:
    """A checkpoint that it did not begin, and one that it would not complete: then everything must be undone first."""
    job = counter("--mib", "8", "--fork", "1", env={"GPUCR_SIM_FAULTS": fault})
    pids = job.processes()
    with pytest.raises(DriverError) as raised:
        gpucr.suspend(job.pid)
    assert raised.value.result == result
    assert_runs(job, driver, pids, 101)


def test_a_resume_the_driver_refuses_leaves_the_job_suspended(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--mib", "8", env={"GPUCR_SIM_FAULTS": "restore#1=2"})
    gpucr.suspend(job.pid)
    with pytest.raises(DriverError, match="cannot restore"):
        gpucr.resume(job.pid)
    assert driver.state(job.pid) is CHECKPOINTED
    assert keeps(job.pid)
    gpucr.resume(job.pid)
    assert_runs(job, driver, [job.pid], 101)


@pytest.mark.criu
@pytest.mark.parametrize("fault", ["restore=2", "complete#2=999"])
def test_a_failed_restore_ends_what_it_started(fault: str, counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "8", env={"GPUCR_SIM_FAULTS": fault})
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    with pytest.raises(DriverError):
        gpucr.restore(tmp_path / "s")
    assert not job.processes()
    assert not [use for use in gpu_processes() if use.pid == job.pid]


@pytest.mark.criu
def test_mismatched_memory_is_not_filled(job: Counter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    real = Carrier.ask

    def less(carrier: Carrier, ask: Ask, descriptors: Sequence[int] = ()) -> Answer:
        answer = real(carrier, ask, descriptors)
        return answer if ask.what != "take_back" else Answer(parts=answer.parts[:1])

    monkeypatch.setattr(Carrier, "ask", less)
    with pytest.raises(CustomStorageError, match="wants other memory back"):
        gpucr.restore(tmp_path / "s")
    assert not job.processes()


# --- which way ---------------------------------------------------------------------------------------------------


def test_an_operation_that_cannot_be_cancelled_is_announced(job: Counter, asked: list[tuple[str, int]]) -> None:
    said: list[bool] = []

    def listen(progress: Progress) -> None:
        if progress.event == "begin" and "which cannot be called off once begun" in progress.description:
            assert "device memory to host memory" in progress.description
            said.append(("checkpoint", job.pid) in asked)

    gpucr.suspend(job.pid, on_progress=listen)
    assert said == [False]
    gpucr.resume(job.pid)


@pytest.mark.parametrize(
    ("way", "is_custom"), [("auto", False), ("custom", True), ("captured", False), ("driver", False)]
)
def test_a_process_with_an_interposer_uses_it_unless_another_way_is_requested(
    way: str, is_custom: bool, counter: CounterFactory, driver: CudaDriver, tmp_path: Path
) -> None:
    variables = {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(tmp_path / "agents")}
    job = counter("--mib", "24", env=variables)
    gpucr.suspend(job.pid, gpu_state=way)  # type: ignore[arg-type]
    assert keeps(job.pid) == is_custom
    gpucr.resume(job.pid)
    assert_runs(job, driver, [job.pid], 101)


def test_it_is_refused_on_a_driver_without_custom_storage(
    job: Counter, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCR_SIM_DRIVER", "610")
    with pytest.raises(
        Unsupported, match=f"process {job.pid} cannot leave by custom storage: this driver has"
    ) as error:
        gpucr.suspend(job.pid, gpu_state="custom")
    assert error.value.code == "GPUCR-GPU-STATE"
    assert_runs(job, driver, job.processes(), 101)


def test_a_gpu_without_room_for_gpucr_uses_staging(
    machine: MakeMachine, counter: CounterFactory, driver: CudaDriver
) -> None:
    machine("640MiB")
    job = counter("--mib", "24")
    with pytest.raises(Unsupported, match=r"has \d+\.\d MiB free, and gpucr needs 640.0 MiB there itself"):
        gpucr.suspend(job.pid, gpu_state="custom")
    notes: list[str] = []
    gpucr.suspend(job.pid, on_progress=lambda progress: notes.append(progress.description))
    assert any("does not hand it over: GPU" in note for note in notes), notes
    assert not keeps(job.pid)
    gpucr.resume(job.pid)
    assert_runs(job, driver, [job.pid], 101)


def test_if_the_carrier_does_not_start_staging_is_used(
    job: Counter, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = own_python.command

    def command_of(module: str, *arguments: object) -> list[str]:
        return ["/bin/false"] if module == carrier.__name__ else real(module, *arguments)

    monkeypatch.setattr(own_python, "command", command_of)
    pids = job.processes()
    with pytest.raises(CustomStorageError, match="has ended"):
        gpucr.suspend(job.pid, gpu_state="custom")
    gpucr.suspend(job.pid)
    assert not any(keeps(pid) for pid in pids)
    gpucr.resume(job.pid)
    assert_runs(job, driver, pids, 101)


# --- between the ways --------------------------------------------------------------------------------------------


@pytest.mark.criu
@pytest.mark.parametrize(("way", "kind"), [("driver", None), ("captured", "captured"), ("custom", "custom_storage")])
def test_a_snapshot_is_restored_the_way_it_was_dumped(
    way: str, kind: str | None, counter: CounterFactory, driver: CudaDriver, tmp_path: Path
) -> None:
    """Staging is in the process or beside it, and the driver restores from that; what it handed over is given back."""
    job = counter("--mib", "8")
    report = gpucr.dump(job.pid, tmp_path / "s", gpu_state=way)  # type: ignore[arg-type]
    assert kinds(report) == ({kind} if kind is not None else set())
    job.reap()
    gpucr.restore(tmp_path / "s")
    assert_runs(job, driver, [job.pid], 101)


@pytest.mark.criu
def test_a_custom_storage_snapshot_is_refused_without_custom_storage(
    job: Counter, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = job.processes()
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    monkeypatch.setenv("GPUCR_SIM_DRIVER", "610")
    with pytest.raises(Unsupported, match="this machine's driver has no custom storage") as raised:
        gpucr.restore(tmp_path / "s", force=True)
    assert raised.value.code == "GPUCR-BACKEND"
    assert not job.processes()
    monkeypatch.setenv("GPUCR_SIM_DRIVER", "615")
    gpucr.restore(tmp_path / "s")
    assert_runs(job, driver, pids, 101)


@pytest.mark.criu
def test_inspect_and_doctor_report_custom_storage(job: Counter, tmp_path: Path) -> None:
    assert "it has custom storage: device memory goes to gpucr, without staging" in command.run("doctor").stdout
    gpucr.dump(job.pid, tmp_path / "s")
    assert "in device/, handed over by the driver" in command.run("inspect", tmp_path / "s").stdout
    told = json.loads(command.run("inspect", "--json", tmp_path / "s").stdout)
    assert "custom_storage" in json.dumps(told)


def test_a_resume_counts_the_carriers_device_memory(
    job: Counter, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore that runs out of device memory loses the process."""
    pids = job.processes()
    gpucr.suspend(job.pid)
    with monkeypatch.context() as patch:
        patch.setattr(suspended, "VAULT_BYTES", 1 << 50)
        with pytest.raises(Unsupported) as raised:
            gpucr.resume(job.pid)
    assert raised.value.code == "GPUCR-GPU-FULL"
    gpucr.resume(job.pid)
    assert_runs(job, driver, pids, 101)


@long
@pytest.mark.criu
def test_a_dump_uses_less_host_memory_than_the_jobs_device_memory(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path
) -> None:
    """In a cgroup smaller than the job, with the carrier. The job is outside: its GPU is host memory."""
    if memory.lies_in_memory(tmp_path):
        pytest.skip("a snapshot in memory takes as much: give pytest a --basetemp on a disk")
    job = counter("--mib", "768")
    dump = "import gpucr, sys; gpucr.dump(int(sys.argv[1]), sys.argv[2], gpu_state=sys.argv[3])"
    with limited(720 << 20) as (folder, _):
        enter = ENTER.format(folder=str(folder))

        def run(gpu_state: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-c", enter + dump, str(job.pid), str(tmp_path / "s"), gpu_state],
                check=False, capture_output=True, text=True,
            )  # fmt: skip

        assert "the kernel would kill processes of the cgroup" in run("captured").stderr
        done = run("custom")
    assert done.returncode == 0, done.stderr
    job.reap()
    gpucr.restore(tmp_path / "s")
    assert_runs(job, driver, [job.pid], 101)
