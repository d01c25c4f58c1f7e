"""Jobs that run under the interposer: dump, freeze and restore on the simulator."""

from __future__ import annotations

import contextlib
import mmap
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import gpucr
from gpucr.criu.engine import Criu
from gpucr.diagnosis import preflight
from gpucr.diagnosis.preflight.measured import Measurements
from gpucr.diagnosis.preflight.traits import JobTraits
from gpucr.driver.cuda import CudaDriver
from gpucr.driver.gpus import gpu_processes, list_gpus
from gpucr.errors import CriuError, InterposerError, SnapshotError, Unsupported
from gpucr.gpu_state.held import device_bytes_here
from gpucr.gpu_state.interposed.restored import BlocksDestination
from gpucr.interposer.build import LIBRARY
from gpucr.interposer.client import Agent
from gpucr.interposer.library import installed, preload_path
from gpucr.interposer.protocol import Code, Operation, Refused, Status
from gpucr.interposer.vault import Vault, VaultFailed, Vaults
from gpucr.linux import memory
from gpucr.model import CudaState, DevicePart, StagedExtent
from gpucr.snapshot.device.writer import DeviceWriter
from tests import command
from tests.compiled import compiled_interposer
from tests.conftest import MakeMachine
from tests.counter import Counter, CounterFactory
from tests.gpu_state.test_interposed import blocks_of
from tests.memory_cgroup import ENTER, limited
from tests.sandboxed import SandboxedCounter, end_all_in, start_counter
from tests.storm import later, long, sample

MIB = 1 << 20
RUNNING = CudaState.RUNNING
pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("sim_only", "state_home")]


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """The environment in which a program's device memory can leave it."""
    return {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(tmp_path / "agents")}


@pytest.fixture
def job(counter: CounterFactory, variables: dict[str, str]) -> Counter:
    """Two processes whose device memory can leave them."""
    return counter("--mib", "24", "--fork", "1", env=variables)


def kinds(report: gpucr.DumpReport) -> dict[DevicePart, str]:
    """The ways in which device memory left."""
    return report.snapshot.manifest.kinds


def assert_runs(job: Counter, driver: CudaDriver, pids: list[int], expected: int) -> None:
    """Assert that each process runs with all of its memory, and that its agent would release it again."""
    assert job.processes() == pids
    assert {driver.state(pid) for pid in pids} == {RUNNING}
    for pid in pids:
        assert blocks_of(pid)[1:] == (0, 0)
    assert job.send("verify") == "ok"
    assert job.ask() == expected


@pytest.mark.parametrize("place", sample(["folder", "store", "encrypted"], 2))
def test_dump_and_restore(place: str, job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    to, key, pids = tmp_path / "s", None, job.processes()
    if place != "folder":
        key = gpucr.Secret.passphrase("a good passphrase") if place == "encrypted" else None
        gpucr.init_store(to, key=key) if key is not None else gpucr.init_store(to)
    before = [blocks_of(pid) for pid in pids]
    report = gpucr.dump(job.pid, to, key=key)
    assert [kind for part, kind in kinds(report).items() if part.level == 1] == ["interposed"] * 2
    job.reap()
    gpucr.restore(report.snapshot.where, key=key)
    assert [blocks_of(pid) for pid in pids] == before
    assert_runs(job, driver, pids, 101)
    # What came back is the process's own, and leaves another time.
    gpucr.suspend(job.pid, gpu_state="interposed")
    gpucr.resume(job.pid)
    assert_runs(job, driver, pids, 102)


@pytest.mark.parametrize("chosen", [None, "by its environment", "by itself"])
def test_device_memory_is_restored_on_other_gpus_in_turn(
    chosen: str | None,
    machine: MakeMachine,
    counter: CounterFactory,
    variables: dict[str, str],
    driver: CudaDriver,
    tmp_path: Path,
) -> None:
    """By processes of their own: the simulated driver remembers the machine on which one has started CUDA.

    On the way back its first device is no longer the first of the machine, nor is it with such an environment.
    """
    uuids = machine("2x1GiB")
    words = ("--visible", "1,0") if chosen == "by itself" else ()
    more = {"CUDA_VISIBLE_DEVICES": "1,0"} if chosen == "by its environment" else {}
    job = counter("--mib", "24", *words, env=variables | more)

    def used() -> set[str]:
        """Where it has its context, and where its blocks are."""
        found = {use.gpu_uuid for use in gpu_processes() if use.pid == job.pid}
        return found.union(device_bytes_here(gpu_processes())[job.pid])

    at = 1 if chosen else 0
    for number in range(1, 4):
        assert used() == {uuids[at]}
        for word in ("suspend", "resume"):
            assert command.run(word, job.pid).returncode == 0
        assert used() == {uuids[at]}
        snapshot = tmp_path / str(number)
        assert command.run("dump", job.pid, "--to", snapshot).returncode == 0
        parts = gpucr.Snapshot.open(snapshot).manifest.device_parts
        assert {extent.gpu for extent in parts[DevicePart(job.pid, 1)].extents} == {uuids[at]}
        job.reap()
        at = 1 - at
        done = command.run("restore", snapshot, "--gpu", str(at))
        assert done.returncode == 0, done.stderr
        assert_runs(job, driver, [job.pid], 100 + number)
    assert used() == {uuids[at]}


def test_each_clone_of_a_job_has_its_own_memory(driver: CudaDriver, tmp_path: Path) -> None:
    """Its agent is in a sandbox, where the folder of the sockets is another one."""
    with contextlib.ExitStack() as opened:
        opened.callback(end_all_in, tmp_path)
        job = opened.enter_context(start_counter(tmp_path, "--mib", "24", name="copied", interpose=True))
        report = gpucr.dump("copied", tmp_path / "s", leave_running=True)
        assert "interposed" in kinds(report).values()
        counts = []
        for _ in range(2):
            clone = gpucr.restore(tmp_path / "s", clone=True)
            assert clone.warnings == ()  # an interposer's socket is its copy's own
            copy = opened.enter_context(SandboxedCounter(clone.pid, job.port))
            assert driver.state(clone.pid) is RUNNING
            assert blocks_of(clone.pid) == blocks_of(job.pid)
            assert blocks_of(clone.pid)[1:] == (0, 0)
            assert copy.send("verify") == "ok"
            counts.append((copy.ask(), copy.ask()))
        assert counts == [(101, 102)] * 2
        assert job.ask() == 101
        assert job.send("verify") == "ok"


def test_a_frozen_job_is_saved_and_thawed(job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    pids = job.processes()
    with gpucr.freeze(job.pid, gpu_state="interposed") as frozen:
        assert frozen.size_bytes >= 2 * 24 * MIB
        one, two = frozen.save(tmp_path / "a"), frozen.save(tmp_path / "b")
        assert kinds(one) == kinds(two)
        parts = [report.snapshot.manifest.device_parts for report in (one, two)]
        assert parts[0] == parts[1]
    assert_runs(job, driver, pids, 101)
    with gpucr.freeze(job.pid) as frozen:
        frozen.end()
    job.reap()
    gpucr.restore(tmp_path / "b")
    assert_runs(job, driver, pids, 101)


@pytest.mark.parametrize("operation", ["dump", "freeze", "suspend"])
def test_preflight_asks_the_agents(
    operation: str, job: Counter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent serves one client at a time: the later copy must not keep preflight from asking."""
    told: list[bool] = []
    real = preflight.check_traps

    def listen(traits: JobTraits, measured: Measurements, *, may_share: bool) -> list[preflight.Finding]:
        told.extend(each.counted is not None for each in traits.processes)
        return real(traits, measured, may_share=may_share)

    monkeypatch.setattr(preflight, "check_traps", listen)
    if operation == "dump":
        gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    elif operation == "freeze":
        gpucr.freeze(job.pid).thaw()
    else:
        gpucr.suspend(job.pid)
        gpucr.resume(job.pid)
    assert told == [True, True]
    assert job.send("verify") == "ok"


@pytest.mark.parametrize("what", ["export", later("drop"), later("read_into"), "criu"])
@pytest.mark.parametrize("leave_running", [False, True])
def test_a_failed_dump_leaves_the_job_running(
    what: str, leave_running: bool, job: Counter, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = job.processes()

    def refuse(*_: object, **__: object) -> object:
        raise Refused(Operation.EXPORT, Code.NO_DESCRIPTORS)

    def fail(*_: object, **__: object) -> object:
        raise VaultFailed("the GPU fell off the bus")

    def not_dumped(*_: object, **__: object) -> object:
        raise CriuError("it does not want to", phase="dump")

    owner, failure = {
        "export": (Agent, refuse), "drop": (Agent, refuse), "read_into": (Vault, fail), "criu": (Criu, not_dumped),
    }[what]  # fmt: skip
    monkeypatch.setattr(owner, {"criu": "dump"}.get(what, what), failure)
    with pytest.raises((InterposerError, CriuError)):
        gpucr.dump(job.pid, tmp_path / "s", leave_running=leave_running)
    monkeypatch.undo()
    assert not (tmp_path / "s").exists()
    assert_runs(job, driver, pids, 101)


def test_a_failed_save_does_not_stop_the_job(
    job: Counter, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is full: the processes continue in the memory to be saved, and wait until it is."""
    pids, dropped = job.processes(), list[int]()
    drop, status = Agent.drop, Agent.status

    def dropping(self: Agent, *, imported_too: bool = False) -> None:
        drop(self, imported_too=imported_too)
        dropped.append(self.pid)

    def disk_is_full(*_: object) -> bool:
        raise SnapshotError("the disk is full", path="s")

    def stuck(self: Agent) -> Status:
        return replace(status(self), stuck=1 if self.pid in dropped else 0)

    monkeypatch.setattr(Agent, "drop", dropping)
    monkeypatch.setattr(Agent, "status", stuck)
    monkeypatch.setattr(DeviceWriter, "wait", disk_is_full)
    with pytest.raises(SnapshotError, match="the disk is full"):
        gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    assert dropped == pids
    monkeypatch.undo()
    assert_runs(job, driver, pids, 101)


def test_a_failed_restore_ends_what_it_started(
    job: Counter, driver: CudaDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = job.processes()
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()

    def refuse(*_: object, **__: object) -> None:
        raise Refused(Operation.IMPORT, Code.NO_MEMORY)

    with monkeypatch.context() as patch:
        patch.setattr(Agent, "give_back", refuse)
        with pytest.raises(InterposerError, match=f"process {pids[0]} did not take its memory back.*no memory"):
            gpucr.restore(tmp_path / "s")
    with monkeypatch.context() as patch:
        real = Agent.blocks
        patch.setattr(Agent, "blocks", lambda self: real(self)[1:])
        with pytest.raises(InterposerError, match="wants 0 blocks of memory, the snapshot has 1"):
            gpucr.restore(tmp_path / "s")
    assert not [use for use in gpu_processes() if use.pid in pids]
    gpucr.restore(tmp_path / "s")
    assert_runs(job, driver, pids, 101)


def test_the_driver_takes_the_memory_on_request(job: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    pids = job.processes()
    report = gpucr.dump(job.pid, tmp_path / "s", gpu_state="captured")
    assert set(kinds(report).values()) == {"captured"}
    job.reap()
    gpucr.restore(tmp_path / "s")
    assert_runs(job, driver, pids, 101)


@long
def test_a_dump_uses_less_host_memory_than_the_jobs_device_memory(
    counter: CounterFactory, variables: dict[str, str], driver: CudaDriver, tmp_path: Path
) -> None:
    """In a cgroup that is smaller than the job. The job itself is outside: its simulated GPU is host memory."""
    if memory.lies_in_memory(tmp_path):
        pytest.skip("a snapshot in memory takes as much: give pytest a --basetemp on a disk")
    job = counter("--mib", "768", env=variables)
    dump = (
        "import gpucr, sys; what = int(sys.argv[1]), sys.argv[2]; way = sys.argv[3]\n"
        "print([each.code for each in gpucr.plan_dump(*what, gpu_state=way).findings], flush=True)\n"
        "gpucr.dump(*what, gpu_state=way)"
    )
    with limited(720 * MIB) as (folder, _):
        enter = ENTER.format(folder=str(folder))

        def run(gpu_state: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-c", enter + dump, str(job.pid), str(tmp_path / "s"), gpu_state],
                check=False, capture_output=True, text=True,
            )  # fmt: skip

        refused = run("captured")
        assert "the kernel would kill processes of the cgroup" in refused.stderr
        assert "GPUCR-HOST-MEMORY" in refused.stdout, "the plan says so too"
        done = run("interposed")
    assert done.returncode == 0, done.stderr
    assert "GPUCR-HOST-MEMORY" not in done.stdout
    job.reap()
    gpucr.restore(tmp_path / "s")
    assert_runs(job, driver, [job.pid], 101)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_pieces_span_blocks(is_pinned: bool) -> None:
    vaults = Vaults(pin_rings=not is_pinned)
    try:
        vault = vaults.of(list_gpus()[0].uuid)
        extents = [StagedExtent(at, 2 * MIB, at) for at in (0, 2 * MIB, 4 * MIB)]
        into = BlocksDestination(DevicePart(1, 1), extents, [(vault, False), (vault, True), (vault, False)])
        data = bytes(range(256)) * (4 * MIB // 256)
        buffer = memoryview(mmap.mmap(-1, 6 * MIB) if is_pinned else bytearray(6 * MIB))
        buffer[MIB : 5 * MIB] = data
        into.write_from(MIB, buffer[MIB : 5 * MIB])
        buffer[:] = bytes(6 * MIB)
        for number, run in enumerate(into._runs):
            vault.read_into(run.made.address, buffer[2 * MIB * number : 2 * MIB * (number + 1)])
        assert buffer == bytes(MIB) + data + bytes(MIB)
        assert bool(vault._pinned) is not is_pinned  # the ring was not needed
        into.close()
    finally:
        vaults.close()


def test_a_restore_installs_the_library_where_the_job_had_it(
    driver: CudaDriver, tmp_path: Path, state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpucr.interposer.library._SHIPPED", compiled_interposer())
    monkeypatch.setattr("gpucr.interposer.library._home", lambda: tmp_path / "data/gpucr/interposer")
    with start_counter(tmp_path, "--mib", "24", name="moved", interpose=True) as job:
        assert job.ask() == 101
        gpucr.dump("moved", tmp_path / "s")
    shutil.rmtree(tmp_path / "data")
    with SandboxedCounter(gpucr.restore(tmp_path / "s").pid, job.port) as job:
        assert (job.ask(), job.send("verify")) == (102, "ok")
    assert [path.name for path in (tmp_path / "data/gpucr/interposer").glob("*/*.so")] == [LIBRARY]
    end_all_in(tmp_path)


def test_a_snapshot_is_refused_without_its_interposer(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path
) -> None:
    library = Path(shutil.copy(compiled_interposer(), tmp_path))
    job = counter("--mib", "24", env={"LD_PRELOAD": str(library), "GPUCR_INTERPOSER_DIR": str(tmp_path / "agents")})
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    library.rename(tmp_path / "elsewhere")
    with pytest.raises(Unsupported, match=f"left by its interposer, and {library} is missing") as raised:
        gpucr.restore(tmp_path / "s")
    assert raised.value.code == "GPUCR-BACKEND"
    assert not job.processes()
    (tmp_path / "elsewhere").rename(library)
    gpucr.restore(tmp_path / "s")
    assert_runs(job, driver, [job.pid], 101)


@pytest.mark.root
@pytest.mark.parametrize(("gpus", "is_full"), [("1x1GiB", False), ("1x300MiB", True)], ids=["room", "full"])
def test_a_rehearsal_beside_the_job(
    gpus: str,
    is_full: bool,
    machine: MakeMachine,
    counter: CounterFactory,
    variables: dict[str, str],
    driver: CudaDriver,
    tmp_path: Path,
) -> None:
    machine(gpus)
    job = counter("--mib", "150", env=variables)
    pids = job.processes()
    command.run_json("dump", job.pid, "--to", tmp_path / "s", "--leave-running")  # this process may know other GPUs
    assert "interposed" in gpucr.open_snapshot(tmp_path / "s").manifest.kinds.values()
    rehearsal = command.run_json("verify", "--rehearse", tmp_path / "s")
    assert bool(rehearsal["left_out"]) is is_full
    assert ("restore" in [phase["name"] for phase in rehearsal["phases"]]) is not is_full
    assert_runs(job, driver, pids, 101)
