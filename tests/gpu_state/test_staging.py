"""Staging: captured, saved around CRIU, put back; and every case in which the plain way is taken."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.gpu_state import staging
from gpucr.gpu_state.driver_staging import DriverStaging
from gpucr.gpu_state.source import FileDestination
from gpucr.gpu_state.staging import Capture, capture
from gpucr.linux import capabilities, memory, processes
from gpucr.linux.injection import InjectionUnavailable
from gpucr.linux.ptrace import TracedThread
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import CudaState, DevicePart, StagedExtent
from gpucr.snapshot.device import DeviceReader, DeviceWriter
from gpucr.snapshot.device.stripes import Stripes
from gpucr.undo.events import Progress
from gpucr.undo.steps import Meter
from tests.conftest import skip_or_fail
from tests.counter import Counter, CounterFactory, out_of_time, wait_until
from tests.storm import later, long

RUNNING, LOCKED, CHECKPOINTED = CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED
MIB = 1 << 20


@pytest.fixture(autouse=True)
def as_root() -> None:
    if not capabilities.can_checkpoint_processes():
        skip_or_fail("root", "staging files and dumps need root")


def notes_of(operation: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """What the operation says about how it moved device memory. (A lock may take two attempts on a busy machine.)"""
    events: list[Progress] = []
    operation(*arguments, on_progress=events.append, **options)
    return [event.description for event in events if event.event == "note" and event.phase != "lock"]


def smaps(pid: int, address: int, field: str) -> int:
    """A field of the mapping that begins at this address, in bytes."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    found = re.search(rf"^{address:08x}-.*?^{field}: +(\d+) kB", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return int(found[1]) * 1024


def assert_unharmed(job: Counter, expected: int) -> None:
    assert job.send("verify") == "ok"
    assert job.ask() == expected
    for tid in processes.threads(job.pid):
        stat = processes.read_stat(tid)
        assert stat is not None
        assert stat.status not in "tT"
        assert processes.tracer_pid(tid) == 0


# --- suspend ---------------------------------------------------------------------------------------------------


def test_staging_of_a_suspended_job_is_a_file_of_huge_pages(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--mib", "64")
    before = set(os.listdir(f"/proc/{job.pid}/fd"))
    assert notes_of(gpucr.suspend, job.pid) == []
    (extent,) = staging.file_extents(job.pid)
    assert extent.size_bytes >= 64 * MIB
    assert smaps(job.pid, extent.address, "ShmemPmdMapped") >= 60 * MIB
    assert len(os.listdir(f"/proc/{job.pid}/fd")) <= len(before)  # nothing of gpucr's stays open in the job
    gpucr.resume(job.pid)
    assert staging.file_extents(job.pid) == ()
    assert_unharmed(job, 101)


def test_without_privileges_staging_is_private_memory_of_huge_pages(
    counter: CounterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "can_checkpoint_processes", lambda: False)
    job = counter("--mib", "64")
    known = {(m.start, m.end) for m in memory.read_maps(job.pid)}
    assert notes_of(gpucr.suspend, job.pid) == []
    new = [m for m in memory.read_maps(job.pid) if (m.start, m.end) not in known and m.end - m.start >= 64 * MIB]
    (mapping,) = [m for m in new if m.is_private_anonymous]
    assert smaps(job.pid, mapping.start, "AnonHugePages") >= 56 * MIB
    assert staging.file_extents(job.pid) == ()
    gpucr.resume(job.pid)
    assert_unharmed(job, 101)


def test_without_huge_pages_private_staging_is_left_to_the_driver(
    counter: CounterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(memory, "_PRIVATE_HUGE_PAGES", tmp_path / "enabled")
    monkeypatch.setattr(capabilities, "can_checkpoint_processes", lambda: False)
    job = counter("--mib", "8")
    (note,) = notes_of(gpucr.suspend, job.pid)
    assert note.endswith(": transparent huge pages are off")
    gpucr.resume(job.pid)
    assert_unharmed(job, 101)


def test_every_process_of_a_job_is_captured(counter: CounterFactory) -> None:
    job = counter("--mib", "16", "--fork", "2")
    assert notes_of(gpucr.suspend, job.pid) == []
    for pid in job.processes():
        assert staging.total_bytes(staging.file_extents(pid)) >= 16 * MIB
    gpucr.resume(job.pid)
    assert_unharmed(job, 101)


def refuse_tracing(monkeypatch: pytest.MonkeyPatch) -> str:
    def seize(tid: int, timeout_s: float | None = None) -> TracedThread:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(TracedThread, "seize", seize)
    return "Operation not permitted"


def refuse_injection(monkeypatch: pytest.MonkeyPatch) -> str:
    def send(thread: TracedThread, fd: int) -> int:
        raise InjectionUnavailable("this thread has a shadow stack")

    monkeypatch.setattr(capture, "send_descriptor", send)
    return "this thread has a shadow stack"


def behave_differently(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(capture, "_SMALLEST_BYTES", 1 << 50)
    return "the driver asked for no staging that is known"


def refuse_the_file(monkeypatch: pytest.MonkeyPatch) -> str:
    def resize(self: object, size_bytes: int) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(StagingFile, "resize", resize)
    return "File too large"


REFUSALS = [refuse_tracing, refuse_injection, behave_differently, refuse_the_file]


@pytest.mark.parametrize("refuse", REFUSALS)
def test_if_staging_cannot_be_captured_the_driver_uses_its_own(
    counter: CounterFactory, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[pytest.MonkeyPatch], str]
) -> None:
    job = counter("--mib", "8")
    reason = refuse(monkeypatch)
    (note,) = notes_of(gpucr.suspend, job.pid)
    assert note.startswith(f"process {job.pid}: ")
    assert note.endswith(f": {reason}")
    gpucr.resume(job.pid)
    assert_unharmed(job, 101)


def test_the_kernel_may_refuse_the_file_during_the_call(
    counter: CounterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's call starts with the file, fails, and is repeated as the driver made it."""
    monkeypatch.setattr(capture, "MAP_SHARED", 0)  # neither shared nor private: EINVAL
    job = counter("--mib", "8")
    (note,) = notes_of(gpucr.suspend, job.pid)
    assert "cannot be mapped (errno 22)" in note
    gpucr.resume(job.pid)
    assert_unharmed(job, 101)


# --- dump and restore ------------------------------------------------------------------------------------------


@pytest.mark.criu
@pytest.mark.parametrize("refuse", REFUSALS[1:])  # if nothing can be traced, nothing can be dumped
def test_uncaptured_memory_goes_through_criu(
    counter: CounterFactory,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    refuse: Callable[[pytest.MonkeyPatch], str],
) -> None:
    job = counter("--mib", "8")
    with monkeypatch.context() as patch:
        reason = refuse(patch)
        notes = notes_of(gpucr.dump, job.pid, tmp_path / "running", leave_running=True)
        assert [note for note in notes if reason in note]
        assert_unharmed(job, 101)
        gpucr.dump(job.pid, tmp_path / "s")
        job.reap()
    manifest = gpucr.Snapshot.open(tmp_path / "s").manifest
    assert manifest.device_parts == {}
    assert sum(extent.size_bytes for extent in manifest.processes[0].staging) >= 8 * MIB
    gpucr.restore(tmp_path / "s")
    assert_unharmed(job, 102)


@pytest.mark.criu
@pytest.mark.parametrize("persist", ["background", "sync"])
def test_when_a_job_left_running_continues(counter: CounterFactory, tmp_path: Path, persist: Any) -> None:
    job = counter("--mib", "16")
    answers: list[tuple[str, bool]] = []

    def ask_at_save(event: Progress) -> None:
        if event.event == "begin" and event.phase == "save":
            job.post()
            answers.append((event.phase, job.answers_within(10.0 if persist == "background" else 0.3)))
            assert not (tmp_path / "s" / "manifest.json").exists()

    report = gpucr.dump(job.pid, tmp_path / "s", leave_running=True, persist=persist, on_progress=ask_at_save)
    assert answers == [("save", persist == "background")]
    assert job.answer() == "101"
    saved = next(phase.seconds for phase in report.phases if phase.name == "save")
    total = sum(phase.seconds for phase in report.phases if phase.name not in ("prepare", "allocate"))
    assert report.downtime_s == pytest.approx(total - (saved if persist == "background" else 0))
    assert_unharmed(job, 102)
    job.kill()
    gpucr.restore(tmp_path / "s")
    assert_unharmed(job, 101)


@pytest.mark.criu
def test_an_unknown_word_for_persist_is_refused(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter()
    with pytest.raises(gpucr.InvalidRequest, match="persist is 'never'") as error:
        gpucr.dump(job.pid, tmp_path / "s", persist="never")  # type: ignore[arg-type]
    assert "background, sync" in (error.value.hint or "")
    assert_unharmed(job, 101)


@pytest.mark.criu
def test_a_failed_save_does_not_harm_a_running_job(
    counter: CounterFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = counter("--mib", "16")

    def write(self: Stripes, piece: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Stripes, "write", write)
    with pytest.raises(gpucr.SnapshotError, match="No space left"):
        gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    assert not (tmp_path / "s").exists()
    assert driver.state(job.pid) is RUNNING
    assert_unharmed(job, 101)


@pytest.mark.criu
def test_a_full_disk_leaves_the_job_unchanged(counter: CounterFactory, driver: CudaDriver, tmp_path: Path) -> None:
    job = counter("--mib", "32")
    (tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", tmp_path / "small"], check=True)
    try:
        with pytest.raises(gpucr.SnapshotError, match="No space left"):
            gpucr.dump(job.pid, tmp_path / "small" / "s", force=True)
        assert list((tmp_path / "small").iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path / "small"], check=True)
    assert driver.state(job.pid) is RUNNING
    assert_unharmed(job, 101)


@pytest.mark.criu
def test_a_writer_failure_after_the_driver_leaves_no_thread_traced(
    counter: CounterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = counter("--mib", "8", "--fork", "1")

    def complete(self: DeviceWriter, part: DevicePart) -> None:
        raise gpucr.SnapshotError("the disk is gone", path="device")

    monkeypatch.setattr(DeviceWriter, "complete", complete)
    with pytest.raises(gpucr.SnapshotError, match="the disk is gone"):
        gpucr.dump(job.pid, tmp_path / "s")
    assert [processes.tracer_pid(tid) for pid in job.processes() for tid in processes.threads(pid)] == [0] * sum(
        len(processes.threads(pid)) for pid in job.processes()
    )
    assert_unharmed(job, 101)


@pytest.fixture
def slow_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A storage that delivers a piece only when the driver waits for it; tells the offsets waited for."""
    waited: list[int] = []
    changed = threading.Condition()
    real_write, real_wait = FileDestination.write_from, DeviceReader.wait_for

    def write_from(self: FileDestination, position: int, data: memoryview) -> None:
        with changed:
            changed.wait_for(lambda: max(waited, default=0) > position)
        real_write(self, position, data)

    def wait_for(self: DeviceReader, part: DevicePart, up_to_bytes: int, timeout_s: float | None = None) -> bool:
        with changed:
            waited.append(up_to_bytes)
            changed.notify_all()
        return real_wait(self, part, up_to_bytes, timeout_s)

    monkeypatch.setattr(FileDestination, "write_from", write_from)
    monkeypatch.setattr(DeviceReader, "wait_for", wait_for)
    yield waited
    with changed:
        waited.append(1 << 62)
        changed.notify_all()


@pytest.mark.criu
def test_the_driver_restores_while_device_memory_is_still_being_read(
    counter: CounterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow_reader: list[int]
) -> None:
    monkeypatch.setattr(staging.gate, "_AHEAD_BYTES", 2 * MIB)
    job = counter("--mib", "24")
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    started: list[int] = []
    real_restore = CudaDriver.restore

    def restore(self: CudaDriver, pid: int, *arguments: Any) -> None:
        started.append(max(slow_reader))
        real_restore(self, pid, *arguments)

    monkeypatch.setattr(CudaDriver, "restore", restore)
    gpucr.restore(tmp_path / "s")
    assert started == [2 * MIB]  # the driver began when the first 2 MiB of 24 were there
    assert len(set(slow_reader)) >= 4  # and stopped at the edge several times
    assert slow_reader == sorted(slow_reader)
    assert_unharmed(job, 101)


@pytest.mark.criu
def test_damaged_device_memory_ends_the_half_restored_job(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "24", "--fork", "1")
    pids = job.processes()
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    stripe = tmp_path / "s" / "device" / f"{pids[-1]}.2"
    with stripe.open("r+b") as file:
        file.seek(1234)
        byte = file.read(1)
        file.seek(1234)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(gpucr.SnapshotDamaged, match=rf"device/{pids[-1]}\.2.*differs"):
        gpucr.restore(tmp_path / "s")
    assert job.processes() == []
    with stripe.open("r+b") as file:
        file.seek(1234)
        file.write(byte)
    gpucr.restore(tmp_path / "s")
    assert job.processes() == pids
    assert_unharmed(job, 101)


@pytest.mark.criu
def test_a_restore_without_a_file_for_device_memory_starts_nothing(
    counter: CounterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = counter("--mib", "8")
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    with monkeypatch.context() as patch:
        refuse_the_file(patch)
        with pytest.raises(gpucr.Unsupported, match="File too large") as error:
            gpucr.restore(tmp_path / "s")
    assert "ulimit -f" in (error.value.hint or "")
    assert job.processes() == []
    gpucr.restore(tmp_path / "s")
    assert_unharmed(job, 101)


@pytest.mark.criu
def test_a_restore_that_reads_too_long_is_ended(
    counter: CounterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = counter("--mib", "24")
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    over = threading.Event()
    real_write = FileDestination.write_from

    def write_from(self: FileDestination, position: int, data: memoryview) -> None:
        over.wait()
        real_write(self, position, data)

    monkeypatch.setattr(FileDestination, "write_from", write_from)

    def go_on_when_undone(event: Progress) -> None:
        if event.event == "undo":
            over.set()

    with pytest.raises(gpucr.DeadlineExceeded):
        gpucr.restore(tmp_path / "s", timeout_s=3, on_progress=go_on_when_undone)
    assert job.processes() == []


@pytest.mark.criu
@pytest.mark.parametrize("leave_running", [False, True])
def test_a_dump_that_saves_too_long_is_undone(
    counter: CounterFactory, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leave_running: bool
) -> None:
    job = counter("--mib", "16")
    over = threading.Event()
    real_write = Stripes.write

    def write(self: Stripes, piece: int, data: memoryview) -> None:
        over.wait()
        real_write(self, piece, data)

    monkeypatch.setattr(Stripes, "write", write)

    def go_on_when_undone(event: Progress) -> None:
        if event.event == "undo":
            over.set()

    def dump(timeout_s: float) -> None:
        over.clear()
        gpucr.dump(
            job.pid, tmp_path / "s", leave_running=leave_running, timeout_s=timeout_s, on_progress=go_on_when_undone
        )

    out_of_time(dump, "while device memory was saved", (2, 8, 32))
    assert not (tmp_path / "s").exists()
    assert driver.state(job.pid) is RUNNING
    assert_unharmed(job, 101)


@pytest.mark.criu
def test_a_job_suspended_in_a_file_is_dumped_around_criu_too(
    counter: CounterFactory, driver: CudaDriver, tmp_path: Path
) -> None:
    job = counter("--mib", "16")
    gpucr.suspend(job.pid)
    report = gpucr.dump(job.pid, tmp_path / "running", leave_running=True)
    assert report.snapshot.manifest.device_parts[DevicePart(job.pid)].stored_bytes >= 16 * MIB
    assert driver.state(job.pid) is CHECKPOINTED
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    gpucr.restore(tmp_path / "s")
    assert driver.state(job.pid) is CHECKPOINTED
    gpucr.resume(job.pid)
    assert_unharmed(job, 101)


@long
@pytest.mark.criu
def test_saving_begins_before_the_driver_has_finished(
    counter: CounterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(staging.extents, "_UNSETTLED_BYTES", 0)
    job = counter("--mib", "512")
    seen: list[int] = []
    real_complete = DeviceWriter.complete

    def complete(self: DeviceWriter, part: DevicePart) -> None:
        seen.append(self.seen_bytes)
        real_complete(self, part)

    monkeypatch.setattr(DeviceWriter, "complete", complete)
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    assert seen[0] > 0
    gpucr.restore(tmp_path / "s")
    assert_unharmed(job, 101)


@long
@pytest.mark.criu
def test_gpucr_itself_stays_small(counter: CounterFactory, tmp_path: Path) -> None:
    job = counter("--mib", "576")
    for code in (f"gpucr.dump({job.pid}, {str(tmp_path / 's')!r})", f"gpucr.restore({str(tmp_path / 's')!r})"):
        # Not ru_maxrss, which begins with that of the process that has started this one.
        program = f"import gpucr; {code}; print(open('/proc/self/status').read())"
        done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", done.stdout, re.MULTILINE)
        assert peak is not None
        assert int(peak[1]) << 10 < 512 * MIB
        if "restore" not in code:
            job.reap()
    assert_unharmed(job, 101)


def test_a_missing_staging_file_differs_from_private_staging(counter: CounterFactory, driver: CudaDriver) -> None:
    job = counter("--mib", "8")
    driver.lock(job.pid, 1000)
    driver.checkpoint(job.pid)
    assert staging.file_extents(job.pid) == ()
    assert DriverStaging(use_files=True).kept_by(job.pid, Meter("checkpoint")) is None
    gpucr.resume(job.pid)
    assert_unharmed(job, 101)


# --- a driver that asks for staging several times --------------------------------------------------------------

PER_GPU = ("per-gpu", "--mib", "24", "--devices", "0,1")
LATE = ("late", "--mib", "48")


@pytest.fixture(params=[later(PER_GPU, id="per-gpu"), pytest.param(LATE, id="late")])
def twice(request: pytest.FixtureRequest, sim_only: None, counter: CounterFactory) -> Counter:
    """A job of 48 MiB whose driver asks for staging twice: at once, or when the first is full."""
    how, *arguments = request.param
    return counter(*arguments, env={"GPUCR_SIM_STAGING": how})


def assert_two_parts(extents: tuple[StagedExtent, ...]) -> None:
    first, second = extents
    assert (first.offset, second.offset % (2 * MIB)) == (0, 0)
    assert 0 <= second.offset - first.size_bytes < 2 * MIB
    assert min(first.size_bytes, second.size_bytes) >= 28 * MIB  # with half of the contexts: nothing was left out


def test_all_staging_of_a_suspended_job_is_in_its_file(twice: Counter) -> None:
    for answer in (101, 102):
        assert notes_of(gpucr.suspend, twice.pid) == []
        extents = staging.file_extents(twice.pid)
        assert_two_parts(extents)
        for extent in extents:
            assert smaps(twice.pid, extent.address, "ShmemPmdMapped") >= 26 * MIB
        gpucr.resume(twice.pid)
        assert staging.file_extents(twice.pid) == ()
        assert_unharmed(twice, answer)


def test_all_private_staging_uses_huge_pages(twice: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "can_checkpoint_processes", lambda: False)
    before = memory.read_maps(twice.pid)
    assert notes_of(gpucr.suspend, twice.pid) == []
    found = staging.locate(before, memory.read_maps(twice.pid))  # one range where the two lie side by side
    assert sum(smaps(twice.pid, extent.address, "AnonHugePages") for extent in found) >= 48 * MIB
    gpucr.resume(twice.pid)
    assert_unharmed(twice, 101)


UNEQUAL = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
for device, size_bytes in enumerate((120 << 20, 2 << 20)):
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size_bytes)) == 0
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_small_last_part_is_captured(sim_only: None, driver: CudaDriver) -> None:
    """Watching must not end when most of NVML's figure has been requested."""
    environment = {**os.environ, "GPUCR_SIM_STAGING": "per-gpu"}
    with subprocess.Popen(
        [sys.executable, "-c", UNEQUAL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        try:
            assert notes_of(gpucr.suspend, program.pid) == []
            large, small = staging.file_extents(program.pid)
            assert (large.size_bytes >= 128 * MIB, 10 * MIB <= small.size_bytes < 12 * MIB) == (True, True)
            gpucr.resume(program.pid)
            assert driver.state(program.pid) is RUNNING
        finally:
            program.kill()


def test_the_unfinished_range_reaches_back_across_the_edge(twice: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    gpucr.suspend(twice.pid)
    first, second = extents = staging.file_extents(twice.pid)
    monkeypatch.setattr(staging.extents, "_UNSETTLED_BYTES", 0)
    filled_bytes = staging.extents.filled_bytes(twice.pid, extents)
    assert second.offset + 26 * MIB <= filled_bytes <= second.offset + second.size_bytes
    assert 26 * MIB <= staging.extents.filled_bytes(twice.pid, extents[:1]) <= first.size_bytes
    monkeypatch.setattr(staging.extents, "_UNSETTLED_BYTES", second.size_bytes + 4 * MIB)
    assert 20 * MIB <= staging.extents.filled_bytes(twice.pid, extents) <= first.size_bytes - 2 * MIB
    gpucr.resume(twice.pid)
    assert_unharmed(twice, 101)


@pytest.mark.criu
def test_all_parts_go_around_criu_and_are_restored(twice: Counter, tmp_path: Path) -> None:
    notes = notes_of(gpucr.dump, twice.pid, tmp_path / "s")
    assert not [note for note in notes if note.startswith("process ")]
    twice.reap()
    snapshot = gpucr.Snapshot.open(tmp_path / "s")
    snapshot.verify()
    data = snapshot.manifest.device_parts[DevicePart(twice.pid)]
    assert_two_parts(data.extents)
    assert data.size_bytes == data.extents[-1].offset + data.extents[-1].size_bytes
    assert snapshot.manifest.processes[0].staging == ()
    assert sum(file.stat().st_size for file in snapshot.images.iterdir()) < 16 * MIB
    gpucr.restore(tmp_path / "s")
    assert_unharmed(twice, 101)


@pytest.mark.criu
@pytest.mark.parametrize("persist", ["background", later("sync")])
def test_all_parts_of_a_job_left_running(twice: Counter, tmp_path: Path, persist: Any) -> None:
    gpucr.dump(twice.pid, tmp_path / "s", leave_running=True, persist=persist)
    assert_unharmed(twice, 101)
    snapshot = gpucr.Snapshot.open(tmp_path / "s")
    snapshot.verify()
    assert_two_parts(snapshot.manifest.device_parts[DevicePart(twice.pid)].extents)
    twice.kill()
    gpucr.restore(tmp_path / "s")
    assert_unharmed(twice, 101)


@pytest.mark.criu
def test_all_parts_of_a_suspended_job(twice: Counter, driver: CudaDriver, tmp_path: Path) -> None:
    gpucr.suspend(twice.pid)
    extents = staging.file_extents(twice.pid)
    gpucr.dump(twice.pid, tmp_path / "running", leave_running=True)
    assert staging.file_extents(twice.pid) == extents
    gpucr.dump(twice.pid, tmp_path / "s")
    twice.reap()
    for name in ("running", "s"):
        snapshot = gpucr.Snapshot.open(tmp_path / name)
        snapshot.verify()
        assert snapshot.manifest.device_parts[DevicePart(twice.pid)].extents == extents
    gpucr.restore(tmp_path / "s")
    assert driver.state(twice.pid) is CHECKPOINTED
    assert staging.file_extents(twice.pid) == extents
    gpucr.resume(twice.pid)
    assert_unharmed(twice, 101)


@pytest.mark.criu
def test_the_first_part_is_saved_before_the_driver_asks_for_the_second(
    sim_only: None, counter: CounterFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(staging.extents, "_UNSETTLED_BYTES", 0)
    how, *arguments = LATE
    job = counter(*arguments, env={"GPUCR_SIM_STAGING": how})
    writers: list[DeviceWriter] = []
    grown: list[tuple[int, int]] = []
    real_add, real_grow, real_redirect = DeviceWriter.add, DeviceWriter.grow, Capture._redirect

    def add(self: DeviceWriter, source: Any) -> None:
        writers.append(self)
        real_add(self, source)

    def grow(self: DeviceWriter, source: Any) -> None:
        grown.append((self.seen_bytes, source.size_bytes))
        real_grow(self, source)

    def redirect(self: Capture, *arguments: Any) -> None:
        if self.extents:  # the driver stands still meanwhile, at the second of its calls
            wait_until(lambda: sum(writer.seen_bytes for writer in writers) >= 28 * MIB, "the first part to be saved")
        real_redirect(self, *arguments)

    monkeypatch.setattr(DeviceWriter, "add", add)
    monkeypatch.setattr(DeviceWriter, "grow", grow)
    monkeypatch.setattr(Capture, "_redirect", redirect)
    gpucr.dump(job.pid, tmp_path / "s")
    job.reap()
    snapshot = gpucr.Snapshot.open(tmp_path / "s")
    snapshot.verify()
    data = snapshot.manifest.device_parts[DevicePart(job.pid)]
    assert_two_parts(data.extents)
    assert grown == [(28 * MIB, data.size_bytes)]  # the page behind 28 MiB waited for what comes to its piece
    gpucr.restore(tmp_path / "s")
    assert_unharmed(job, 101)


@pytest.mark.criu
def test_the_driver_restores_all_parts_while_they_are_still_being_read(
    twice: Counter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow_reader: list[int]
) -> None:
    monkeypatch.setattr(staging.gate, "_AHEAD_BYTES", 2 * MIB)
    report = gpucr.dump(twice.pid, tmp_path / "s")
    twice.reap()
    gpucr.restore(tmp_path / "s")
    first, second = report.snapshot.manifest.device_parts[DevicePart(twice.pid)].extents
    assert len({offset for offset in slow_reader if offset <= first.size_bytes}) >= 4
    assert len({offset for offset in slow_reader if offset > second.offset}) >= 4
    assert slow_reader == sorted(slow_reader)
    assert_unharmed(twice, 101)


@pytest.mark.criu
@pytest.mark.parametrize("leave_running", [False, later(True)])
def test_an_uncaptured_part_goes_through_criu(
    twice: Counter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leave_running: bool
) -> None:
    real_redirect = Capture._redirect

    def redirect(self: Capture, *arguments: Any) -> None:
        with monkeypatch.context() as patch:
            if self.extents:
                patch.setattr(capture, "MAP_SHARED", 0)  # neither shared nor private: EINVAL
            real_redirect(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Capture, "_redirect", redirect)
        notes = notes_of(gpucr.dump, twice.pid, tmp_path / "s", leave_running=leave_running)
    assert [note for note in notes if "cannot be mapped (errno 22)" in note]
    if leave_running:
        assert_unharmed(twice, 101)
        twice.kill()
    else:
        twice.reap()
    snapshot = gpucr.Snapshot.open(tmp_path / "s")
    snapshot.verify()
    (captured,) = snapshot.manifest.device_parts[DevicePart(twice.pid)].extents
    assert captured.size_bytes >= 28 * MIB
    assert sum(extent.size_bytes for extent in snapshot.manifest.processes[0].staging) >= 28 * MIB
    gpucr.restore(tmp_path / "s")
    assert_unharmed(twice, 101)
