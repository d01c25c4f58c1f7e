"""A first pass saves device memory while the job runs and writes to it: every snapshot is of the frozen moment."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.driver.gpus import list_gpus
from gpucr.errors import SnapshotDamaged, SnapshotError
from gpucr.gpu_state.interposed import first_pass, keeping
from gpucr.gpu_state.interposed.backend import Interposed
from gpucr.gpu_state.interposed.blocks import BlocksSource
from gpucr.gpu_state.interposed.restored import BlocksDestination
from gpucr.interposer.library import installed, preload_path
from gpucr.interposer.vault import Vault
from gpucr.linux import memory
from gpucr.model import CudaState, DevicePart
from gpucr.snapshot.device import writer
from gpucr.undo.events import Progress
from tests import command
from tests.compiled import compiled_interposer
from tests.conftest import MakeMachine
from tests.counter import CounterFactory, wait_until
from tests.scenarios.test_killed import is_claimed
from tests.snapshot.saved_memory import saved_memory
from tests.stepping import Job, StartJob
from tests.storm import IS_STORM, later

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("sim_only")]

MIB = 1 << 20
STARTS = """
if "LD_PRELOAD" not in os.environ:
    os.execve(sys.executable, sys.orig_argv, {**os.environ, "LD_PRELOAD": "LIBRARY", "GPUCR_INTERPOSER_DIR": "AGENTS"})
import ctypes, random
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer, random = ctypes.c_void_p(), ctypes.c_uint64(), random.Random(1)
assert cuda.cuInit(0) == cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
def allocate(mib):
    result = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(mib << 20))
    return pointer.value if result == 0 else result
def write(block, at, size):
    data = random.randbytes(size)
    assert cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(block + at), data, ctypes.c_size_t(size)) == 0
"""
WRITES = (
    STARTS
    + """
sizes = [2, 6, 4, 2, 8, 2]
blocks = [allocate(mib) for mib in sizes]
for block, mib in zip(blocks, sizes):
    write(block, 0, (mib << 20) - 4096)
done()
while True:
    number = random.randrange(HOT)
    size = random.choice([1, 4096, 1 << 18])
    write(blocks[number], random.randrange((sizes[number] << 20) - size), size)
    if random.randrange(200) == 0:  # its place, and what is behind it, moves
        assert cuda.cuMemFree_v2(ctypes.c_uint64(blocks[number])) == 0
        blocks[number] = allocate(sizes[number])
"""
)


@pytest.fixture(scope="module")
def library() -> Path:
    return compiled_interposer()


@pytest.fixture
def run(start: StartJob, library: Path, tmp_path: Path) -> Callable[..., Job]:
    """Start a program under the interposer. ``words`` are replaced in its code."""

    def run(code: str, **words: object) -> Job:
        for word, value in {"LIBRARY": library, "AGENTS": tmp_path / "agents", **words}.items():
            code = code.replace(word, str(value))
        return start(code)

    return run


@pytest.fixture(autouse=True)
def everything_is_saved_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_pass, "FEW_BYTES", 0)
    monkeypatch.setattr(first_pass, "AGAIN_S", 0.01)


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What is in device memory when the job stands still, read apart from what is saved."""
    seen: list[bytes] = []
    complete = Interposed.complete

    def read_all(self: Interposed, meter: Any) -> None:
        self._vaults.start_all(self._preparation.needed)
        whole = bytearray(self.blocks.size_bytes)
        self.blocks.read_into(0, memoryview(whole))
        seen.append(bytes(whole))
        complete(self, meter)

    monkeypatch.setattr(Interposed, "complete", read_all)
    return seen


def saved(report: gpucr.DumpReport, pid: int) -> bytes:
    """The device memory in a snapshot."""
    return bytes(saved_memory(report, pid))


def crowd(monkeypatch: pytest.MonkeyPatch, gpu_mib: int, host_mib: int) -> None:
    """So much is free when the job stands still."""
    gpus = list_gpus()
    monkeypatch.setattr(keeping, "list_gpus", lambda: [replace(gpu, memory_free_bytes=gpu_mib * MIB) for gpu in gpus])
    monkeypatch.setattr(memory, "available_bytes", lambda: host_mib * MIB)


@pytest.mark.parametrize("hot", [pytest.param(6, id="all"), later(2, id="some")])
@pytest.mark.parametrize(("place", "gpu_mib", "host_mib"), [
    ("folder", 4096, 4096), ("store", 270, 4096), later("folder", 270, 4096), later("store", 4096, 4096),
    ("store", 200, 4096), later("folder", 200, 4096), later("store", 200, 0), later("folder", 200, 0),
])  # fmt: skip
def test_a_job_writes_while_it_is_copied(
    run: Callable[..., Job],
    driver: CudaDriver,
    frozen: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    gpu_mib: int,
    host_mib: int,
    hot: int,
) -> None:
    crowd(monkeypatch, gpu_mib, host_mib)
    job = run(WRITES, HOT=hot)
    for number in range(60 if IS_STORM else 2):
        if place == "store" and number % 10 == 0:
            fresh_store(tmp_path / "store")
        to = tmp_path / f"s{number}" if place == "folder" else f"{tmp_path / 'store'}#s{number}"
        report = gpucr.dump(job.pid, to, leave_running=True)
        assert saved(report, job.pid) == frozen[number]
        report.snapshot.verify()
        if place == "folder":
            shutil.rmtree(to)
    assert driver.state(job.pid) is CudaState.RUNNING


def fresh_store(path: Path) -> None:
    """An empty one: a storm would fill the disk."""
    if path.exists():
        shutil.rmtree(path)
    gpucr.init_store(path)


STANDS = (
    STARTS
    + """
blocks = [allocate(8), allocate(6)]
write(blocks[0], 0, 8 << 20)
write(blocks[1], 1 << 20, 1 << 20)
while True:
    done()
    step()
    write(blocks[0], 3 << 20, 100)
"""
)


ONE, ALL = "write(blocks[0], 3 << 20, 100)", "write(blocks[0], 0, 8 << 20); write(blocks[1], 0, 6 << 20)"


def notes_of(*about: Any, **options: Any) -> tuple[gpucr.DumpReport, list[str]]:
    """A dump, and what it says about its first pass."""
    said: list[str] = []

    def listen(progress: Progress) -> None:
        if progress.event == "note" and progress.phase == "first-pass":
            said.append(progress.description)

    return gpucr.dump(*about, on_progress=listen, **options), said


@pytest.mark.parametrize("place", ["folder", "store", later("encrypted"), later("sha256")])
def test_unchanged_memory_is_not_read_again(
    run: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    key = gpucr.Secret.passphrase("a good passphrase") if place == "encrypted" else None
    if place == "sha256":
        monkeypatch.setattr("gpucr.extras.is_installed", lambda _: False)
    if place != "folder":
        gpucr.init_store(tmp_path / "store", key=key)
    read: list[tuple[bool, int]] = []
    read_into = BlocksSource.read_into

    def watched(self: BlocksSource, position: int, data: memoryview) -> bytes | None:
        read.append((self._changes, position))
        return read_into(self, position, data)

    monkeypatch.setattr(BlocksSource, "read_into", watched)
    job = run(STANDS)

    def dump(name: str) -> tuple[gpucr.DumpReport, list[str]]:
        read.clear()
        to = tmp_path / name if place == "folder" else f"{tmp_path / 'store'}#{name}"
        return notes_of(job.pid, to, leave_running=True, key=key)

    first, said = dump("a")
    whole = hashlib.sha256(saved(first, job.pid)).digest()
    assert read
    assert all(changes for changes, _ in read), "everything was read while the job ran"
    assert said[-1].endswith(" 0 B left"), said
    second, said = dump("b")
    if place in ("store", "encrypted"):
        assert read == [], "the store has all of it"
        assert " 0 B copied, 0 B left" in said[-1]
    assert hashlib.sha256(saved(second, job.pid)).digest() == whole
    job.go_on()
    third, _ = dump("c")
    assert hashlib.sha256(saved(third, job.pid)).digest() != whole
    if place in ("store", "encrypted"):
        assert {position for _, position in read} == {2 * MIB}
    third.snapshot.verify()


def test_a_job_that_changes_everything_is_not_copied(
    run: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run(STANDS.replace(ONE, ALL))
    looks = 0
    digests = BlocksSource.digests

    def look(self: BlocksSource, *about: Any) -> list[bytes | None]:
        nonlocal looks
        looks += self._changes
        if self._changes:
            job.go_on()
        return digests(self, *about)

    monkeypatch.setattr(BlocksSource, "digests", look)
    report, said = notes_of(job.pid, tmp_path / "s", leave_running=True)
    assert "changes" in said[0]
    assert " 0 B known, 0 B copied" in said[1]
    assert looks == 2
    report.snapshot.verify()


def test_most_of_what_is_copied_has_changed_meanwhile(
    run: Callable[..., Job], frozen: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks it stood still; while it is copied, it does not."""
    monkeypatch.setattr(writer, "_FEW", 1)
    monkeypatch.setattr(first_pass, "MOST_THREADS", 1)
    job = run(STANDS.replace(ONE, ALL))
    read: list[int] = []
    read_into = BlocksSource.read_into

    def reads(self: BlocksSource, position: int, data: memoryview) -> bytes | None:
        if self._changes:
            if not read:
                job.go_on()
            read.append(position)
        return read_into(self, position, data)

    monkeypatch.setattr(BlocksSource, "read_into", reads)
    report, _ = notes_of(job.pid, tmp_path / "s", leave_running=True)
    assert len(read) == 1
    assert saved(report, job.pid) == frozen[0]


def test_a_frozen_job_is_saved_again(run: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store has by then is not read from the GPU."""
    gpucr.init_store(tmp_path / "store")
    read: list[int] = []
    read_into = BlocksSource.read_into

    def watched(self: BlocksSource, position: int, data: memoryview) -> bytes | None:
        read.append(position)
        return read_into(self, position, data)

    monkeypatch.setattr(BlocksSource, "read_into", watched)
    job = run(STANDS)
    with gpucr.freeze(job.pid) as frozen:
        first = frozen.save(f"{tmp_path / 'store'}#a")
        assert read
        read.clear()
        second = frozen.save(f"{tmp_path / 'store'}#b")
        assert read == []
    assert saved(first, job.pid) == saved(second, job.pid)
    job.go_on()


def test_zeros_are_neither_read_nor_written(
    run: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run(STANDS.replace("write(blocks[0], 0, 8 << 20)\n", "").replace("write(blocks[1], 1 << 20, 1 << 20)\n", ""))

    def read(*_: object) -> None:
        raise AssertionError("zeros are read")

    monkeypatch.setattr(BlocksSource, "read_into", read)
    report, said = notes_of(job.pid, tmp_path / "s", leave_running=True)
    assert said[-1].endswith(" 0 B left")
    assert report.snapshot.manifest.device_parts[DevicePart(job.pid, 1)].stored_bytes == 0
    report.snapshot.verify()


def test_other_bytes_than_on_the_gpu_are_an_error(
    run: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpucr.init_store(tmp_path / "store")
    job = run(STANDS)
    read_into = Vault.read_into

    def flips(self: Vault, address: int, data: memoryview) -> None:
        read_into(self, address, data)
        if len(data) > MIB:
            data[12345] ^= 1

    monkeypatch.setattr(Vault, "read_into", flips)
    with pytest.raises(SnapshotError, match="has other bytes here than on its GPU"):
        gpucr.dump(job.pid, tmp_path / "store", leave_running=True)
    job.go_on()


SWAPS = (
    STARTS
    + """
blocks = [allocate(32), allocate(32)]
while True:
    done(blocks)
    step()
    for number in range(2):
        assert cuda.cuMemFree_v2(ctypes.c_uint64(blocks[number])) == 0
        blocks[number] = allocate(32)
"""
)

AT_THE_BRIM = """
import pathlib, sys, time, gpucr
from gpucr.gpu_state.interposed.blocks import BlocksSource
from gpucr.gpu_state.interposed.restored import BlocksDestination
from gpucr.interposer import vault
vault.ROOMY_BYTES = 0
pid, folder, digests = int(sys.argv[1]), pathlib.Path(sys.argv[2]), BlocksSource.digests
def look(self, *about):
    if self._changes:
        (folder / "go-1").touch()
        end = time.monotonic() + 50
        while not (folder / "done-1").exists():
            assert time.monotonic() < end
            time.sleep(0.002)
    return digests(self, *about)
BlocksSource.digests = look
report = gpucr.dump(pid, sys.argv[3], leave_running=True, on_progress=lambda p: print(p.event, p.description))
report.snapshot.verify()
"""


def test_the_job_gets_memory_that_the_first_pass_holds(
    machine: MakeMachine, run: Callable[..., Job], tmp_path: Path
) -> None:
    """What it frees is still held by gpucr when it allocates again, and the GPU is full."""
    machine("1x128MiB")
    job = run(SWAPS)
    done = command.python(AT_THE_BRIM, job.pid, job.folder, tmp_path / "s")
    assert done.returncode == 0, done.stderr
    assert min(json.loads((job.folder / "done-1").read_text())) > MIB
    assert "the first pass ended: the job needs device memory" in done.stdout
    job._turn = 1
    assert min(json.loads(job.go_on())) > MIB


@pytest.mark.parametrize("place", ["folder", later("store"), later("encrypted")])
def test_a_restore_checks_on_the_gpu(
    run: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """What arrives there with other bytes is read again; what is damaged in the snapshot is an error as ever."""
    key = gpucr.Secret.passphrase("a good passphrase") if place == "encrypted" else None
    if place != "folder":
        gpucr.init_store(tmp_path / "s", key=key)
    job = run(STANDS)
    report = job.dump_and_end(tmp_path / "s", key=key)
    checked: list[list[int]] = []
    differing, write_from = BlocksDestination.differing, BlocksDestination.write_from

    def watched(self: BlocksDestination, *about: Any) -> list[int]:
        checked.append(differing(self, *about))
        return checked[-1]

    def flips(self: BlocksDestination, position: int, data: memoryview) -> None:
        if position == 0 and not checked:
            data = memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))
        write_from(self, position, data)

    monkeypatch.setattr(BlocksDestination, "differing", watched)
    monkeypatch.setattr(BlocksDestination, "write_from", flips)
    gpucr.restore(report.snapshot.where, key=key)
    assert checked == [[0]], "one piece arrived with other bytes, and was read again"
    job.forget()
    job.go_on()
    again = gpucr.dump(job.pid, tmp_path / "t", leave_running=True)
    data = saved(again, job.pid)
    assert data[: 3 * MIB] == saved(report, job.pid)[: 3 * MIB]


def test_a_damaged_snapshot_is_an_error_before_the_job_runs(run: Callable[..., Job], tmp_path: Path) -> None:
    job = run(STANDS)
    job.dump_and_end(tmp_path / "s")
    stripe = tmp_path / "s" / "device" / f"{DevicePart(job.pid, 1)}.0"
    with stripe.open("r+b") as file:
        file.seek(MIB)
        byte = file.read(1)
        file.seek(MIB)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(SnapshotDamaged, match="differs from what was written"):
        gpucr.restore(tmp_path / "s")
    assert job.pids() == []


KILLED = """
import itertools, os, random, signal, sys, gpucr
from gpucr.gpu_state.interposed import first_pass, keeping
from gpucr.gpu_state.interposed.changes import Changes
from gpucr.interposer.client import Agent
from gpucr.interposer.library import installed, preload_path
from gpucr.interposer.vault import Vault
from gpucr.snapshot.device.writer import DeviceWriter
pid, to, last, operation = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
first_pass.FEW_BYTES, first_pass.AGAIN_S = 0, 0.0
if last % 2:
    real = keeping.choose
    keeping.choose = lambda needed, free, host, **options: real(needed, {}, host, **options)
count = itertools.count(1)
def watch(owner, name):
    called = getattr(owner, name)
    def watched(*arguments, **options):
        if next(count) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        result = called(*arguments, **options)
        return list(result) if name in ("show", "export") else result
    setattr(owner, name, watched)
for owner, names in ((Agent, "lend show close_gate export drop give_back keep"), (Changes, "keep_on_gpu keep_on_host"),
                     (Vault, "see_all launch copy_on_device read_into read forget"),
                     (DeviceWriter, "add look begin_early end_early differing complete sync")):
    for name in names.split():
        watch(owner, name)
if operation == "suspend":
    gpucr.suspend(pid)
    gpucr.resume(pid)
else:
    gpucr.dump(pid, to, leave_running=True)
print(next(count))
"""
KILLS = 300 if IS_STORM else 4


@pytest.mark.parametrize("operation", ["dump", later("suspend")])
def test_killed_in_and_around_both_passes(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path, operation: str
) -> None:
    variables = {"LD_PRELOAD": preload_path(installed()), "GPUCR_INTERPOSER_DIR": str(tmp_path / "agents")}
    job, store, chance = counter("--mib", "24", "--fork", "1", env=variables), tmp_path / "store", random.Random(1)  # noqa: S311
    pids = job.processes()
    fresh_store(store)
    calls = int(command.python(KILLED, job.pid, store, 0, operation).stdout)
    for number in range(KILLS):
        if number % 20 == 0:
            fresh_store(store)
        last = chance.randrange(1, calls)
        done = command.python(KILLED, job.pid, f"{store}#s{number}", last, operation)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        wait_until(lambda: not is_claimed(pids), "the guard to be done")
        if operation == "suspend" and CudaState.RUNNING not in {driver.state(pid) for pid in pids}:
            gpucr.resume(job.pid)
        assert job.processes() == pids
        assert {driver.state(pid) for pid in pids} == {CudaState.RUNNING}, f"killed in call {last}"
        assert job.ask() == 101 + number
        assert job.send("verify") == "ok"
    whole = gpucr.dump(job.pid, store)
    assert gpucr.verify_snapshots(store, deep=True).problems == {}
    job.reap()
    gpucr.restore(whole.snapshot.where)
    assert job.send("verify") == "ok"
