"""Jobs dumped into and restored from a store: deduplication, restores, and failures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.linux import memory
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import CudaState, DevicePart
from gpucr.snapshot import working_folder
from gpucr.snapshot.in_store import SnapshotInStore
from gpucr.store import writers
from gpucr.store.local import LocalBackend
from gpucr.store.objects import ObjectsBackend, Patience
from gpucr.store.opened import Store
from tests.command import command, run, run_json
from tests.counter import Counter, CounterFactory, kill_at_once, wait_until
from tests.ranks import RanksFactory
from tests.store.s3_server import BUCKET, CuttingProxy, Server, serving
from tests.storm import later, long

RUNNING = CudaState.RUNNING
KEY = gpucr.Secret.key_file(bytes(range(32)))
AT_ONCE = gpucr.PruneRules(grace_s=0.0, dead_after_s=0.0)
_MOST_FILES = 512

pytestmark = pytest.mark.criu


@pytest.fixture
def store(tmp_path: Path) -> Path:
    gpucr.init_store(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def no_working_folder_stays(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The only folder in which CRIU's images may be in transit."""
    place = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield
    assert [name for name in os.listdir(place) if name.startswith(working_folder.PREFIX)] == []


def at(store: Path, name: str) -> str:
    return f"{store}#{name}"


def opened(store: Path | str, name: str = "latest", key: gpucr.Secret | None = None) -> SnapshotInStore:
    snapshot = gpucr.open_snapshot(f"{store}#{name}", key)
    assert isinstance(snapshot, SnapshotInStore)
    return snapshot


def names(store: Path | str, key: gpucr.Secret | None = None) -> list[str | None]:
    return [each.name for each in gpucr.list_snapshots(store, key=key).intact()]


def assert_comes_back(job: Counter, place: str, expected: int, **options: Any) -> None:
    """Restore it, let it keep counting, and end it."""
    gpucr.restore(place, **options)
    assert job.ask() == expected
    assert job.send("verify") == "ok"
    job.kill()


def assert_only_host_memory_is_new(report: gpucr.DumpReport) -> None:
    """Nothing of device memory was written. Of host memory how much is chance: one page that differs makes 2 MiB."""
    host_bytes = sum(file.size_bytes for file in report.snapshot.manifest.files)
    assert report.counts.written_bytes < host_bytes + (1 << 20)


# --- what is written -------------------------------------------------------------------------------------------


def test_an_idle_job_is_written_once(counter: CounterFactory, store: Path) -> None:
    job = counter("--mib", "128", "--fork", "1")  # so much that all host memory would be less than 5 %
    assert job.ask() == 101
    first = gpucr.dump(job.pid, at(store, "first"), leave_running=True)
    second = gpucr.dump(job.pid, at(store, "second"))
    job.reap()
    assert first.left_running
    assert first.counts.written_bytes > 128 << 20
    assert second.counts.written_bytes < first.counts.written_bytes * 0.05
    assert_only_host_memory_is_new(second)
    for report in (first, second):
        counts = report.counts
        data = report.snapshot.manifest.device_parts.values()
        assert counts.seen_bytes >= sum(each.size_bytes for each in data) + sum(
            file.size_bytes for file in report.snapshot.manifest.files
        )
        assert counts.zero_bytes >= sum(each.size_bytes - each.stored_bytes for each in data) > 0
    assert first.counts.known_bytes > 0, "the two processes hold the same"
    assert names(store) == ["first", "second"]
    assert_comes_back(job, at(store, "second"), 102)
    assert_comes_back(job, at(store, "first"), 102)


def test_changed_data_is_written(counter: CounterFactory, store: Path) -> None:
    job = counter("--mib", "16")
    first = gpucr.dump(job.pid, at(store, "a"), leave_running=True)
    again = gpucr.dump(job.pid, at(store, "b"), leave_running=True)
    assert job.ask() == 101
    changed = gpucr.dump(job.pid, at(store, "c"))
    job.reap()
    assert_only_host_memory_is_new(again)
    assert changed.counts.written_bytes < first.counts.written_bytes
    (device,) = [each for each in gpucr.diff_snapshots(at(store, "b"), at(store, "c")) if each.kind == "device"]
    extents = opened(store, "c").manifest.device_parts[DevicePart(job.pid)].extents
    assert device.pid == job.pid
    assert 0 < device.changed_bytes <= 2 * (2 << 20)
    for start, end in device.ranges:
        assert any(extent.address <= start < end <= extent.end for extent in extents)
    assert [each for each in gpucr.diff_snapshots(at(store, "a"), at(store, "b")) if each.kind == "device"] == []
    assert_comes_back(job, at(store, "b"), 101)
    assert_comes_back(job, at(store, "c"), 102)


@long
def test_replicas_share_common_data(counter: CounterFactory, store: Path) -> None:
    replicas = [counter("--mib", "128") for _ in range(3)]
    written = [
        gpucr.dump(job.pid, at(store, f"replica-{number}")).counts.written_bytes for number, job in enumerate(replicas)
    ]
    assert max(written[1:]) < written[0] * 0.05
    for number, job in enumerate(replicas):
        job.reap()
        assert_comes_back(job, at(store, f"replica-{number}"), 101)


def test_two_jobs_are_dumped_concurrently(counter: CounterFactory, store: Path) -> None:
    jobs = [counter("--mib", "16") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda job: run("dump", job.pid, "--to", at(store, f"job-{job.pid}")), jobs))
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    assert gpucr.prune_store(store, AT_ONCE).dead_writers == ()
    assert not gpucr.verify_snapshots(store, deep=True).problems
    for job in jobs:
        job.reap()
        assert_comes_back(job, at(store, f"job-{job.pid}"), 101)


def test_ranks_are_dumped_twice_and_restored(ranks: RanksFactory, driver: CudaDriver, store: Path) -> None:
    job = ranks(2)
    gpucr.dump(job.pid, at(store, "before"), leave_running=True)
    job.assert_goes_on()
    gpucr.dump(job.pid, at(store, "after"))
    job.reap()
    for name in ("after", "before"):
        gpucr.restore(at(store, name))
        job.assert_goes_on()
        assert {driver.state(pid) for pid in job.ranks} == {RUNNING}
        job.close()


def test_remaining_snapshots_are_restored_after_a_prune(counter: CounterFactory, store: Path) -> None:
    job = counter("--mib", "16")
    for number in range(4):
        assert job.ask() == 101 + number
        gpucr.dump(job.pid, at(store, str(number)), leave_running=True)
    job.kill()
    pruned = gpucr.prune_store(store, gpucr.PruneRules(keep_last=2, grace_s=0.0, repack_below=1.0))
    assert [each.name for each in pruned.removed] == ["0", "1"]
    gpucr.remove_snapshot(at(store, "3"))
    for _ in range(2):
        gpucr.prune_store(store, AT_ONCE)
    assert names(store) == ["2"]
    assert not gpucr.verify_snapshots(store, deep=True).problems
    assert_comes_back(job, str(store), 104)


def test_a_job_without_cuda(process_without_cuda: int, store: Path) -> None:
    report = gpucr.dump(process_without_cuda, at(store, "plain"), leave_running=True)
    assert report.counts.seen_bytes > 0
    assert not report.snapshot.manifest.is_in_store
    report.snapshot.verify()
    assert opened(store).manifest == report.snapshot.manifest


@pytest.fixture
def many_threads() -> Iterator[subprocess.Popen[bytes]]:
    """A process of more threads than a process may have open files: CRIU makes an image of each."""
    program = (
        "import threading, time\n"
        "threading.stack_size(64 << 10)\n"
        f"for _ in range({_MOST_FILES}):\n"
        "    threading.Thread(target=time.sleep, args=(1e4,), daemon=True).start()\n"
        "time.sleep(1e4)\n"
    )
    null = subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=null, stdout=null, stderr=null, start_new_session=True
    )
    try:
        wait_until(lambda: len(os.listdir(f"/proc/{process.pid}/task")) > _MOST_FILES, "its threads")
        yield process
    finally:
        kill_at_once([process.pid])  # also if it has come back, as a child of another one
        process.wait()


def test_more_images_than_the_open_file_limit(many_threads: subprocess.Popen[bytes], store: Path) -> None:
    def limited(*arguments: object) -> None:
        limit = ["prlimit", f"--nofile={_MOST_FILES}:", *command(*arguments)]
        done = subprocess.run(limit, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    limited("dump", many_threads.pid, "--to", at(store, "a"), "-q")
    many_threads.wait()
    assert len(opened(store).manifest.files) > _MOST_FILES
    limited("restore", at(store, "a"), "-q")
    assert len(os.listdir(f"/proc/{many_threads.pid}/task")) > _MOST_FILES


@pytest.mark.by_user
@pytest.mark.parametrize("persist", ["background", later("sync")])
def test_left_running(counter: CounterFactory, store: Path, persist: gpucr.Persist) -> None:
    job = counter("--mib", "16")
    report = gpucr.dump(job.pid, store, leave_running=True, persist=persist, compress="strong")
    assert job.ask() == 101
    assert opened(store).where == report.snapshot.where == f"{store}#{opened(store).stored.id}"
    job.kill()
    assert_comes_back(job, report.snapshot.where, 101)


def test_a_suspended_job_stays_suspended(counter: CounterFactory, driver: CudaDriver, store: Path) -> None:
    job = counter("--mib", "16")
    gpucr.suspend(job.pid)
    gpucr.dump(job.pid, at(store, "asleep"))
    job.reap()
    gpucr.restore(at(store, "asleep"))
    assert driver.state(job.pid) is CudaState.CHECKPOINTED
    gpucr.resume(job.pid)
    assert job.ask() == 101
    assert job.send("verify") == "ok"


# --- encrypted -------------------------------------------------------------------------------------------------


@pytest.mark.by_user
def test_encrypted(counter: CounterFactory, tmp_path: Path) -> None:
    store = tmp_path / "store"
    gpucr.init_store(store, key=KEY)
    job = counter("--mib", "16")
    with pytest.raises(gpucr.WrongKey):
        gpucr.dump(job.pid, at(store, "a"))
    gpucr.dump(job.pid, at(store, "a"), key=KEY, encrypt=True, leave_running=True)
    again = gpucr.dump(job.pid, at(store, "b"), key=KEY)
    job.reap()
    assert_only_host_memory_is_new(again)
    for secret in (None, gpucr.Secret.key_file(bytes(32)), gpucr.Secret.passphrase("guess")):
        with pytest.raises(gpucr.WrongKey):
            gpucr.restore(at(store, "a"), key=secret)
    assert not job.processes()
    new = gpucr.Secret.key_file(bytes(range(32, 64)))
    (old,) = gpucr.store_keys(store, key=KEY)
    assert len(gpucr.store_keys(store, key=KEY, add=new)) == 2
    gpucr.store_keys(store, key=new, remove=old.id)
    with pytest.raises(gpucr.WrongKey):
        gpucr.list_snapshots(store, key=KEY)
    assert_comes_back(job, at(store, "b"), 101, key=new)


def test_a_dump_to_an_unencrypted_store_is_refused_with_encrypt(counter: CounterFactory, store: Path) -> None:
    job = counter("--mib", "1")
    with pytest.raises(gpucr.StoreError, match="is not encrypted"):
        gpucr.dump(job.pid, at(store, "a"), encrypt=True)
    with pytest.raises(gpucr.StoreError, match="is not encrypted"):
        gpucr.dump(job.pid, at(store, "a"), key=KEY)
    for options in ({"encrypt": True}, {"key": KEY}, {"compress": "strong"}):
        with pytest.raises(gpucr.InvalidRequest, match="is not a store"):
            gpucr.dump(job.pid, store.parent / "folder", **options)
    assert job.ask() == 101
    assert names(store) == []


def test_images_on_disk_are_reported_if_the_store_is_encrypted(
    counter: CounterFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpucr.init_store(tmp_path / "store", key=KEY)
    job = counter("--mib", "1")
    monkeypatch.setattr(working_folder.WorkingFolder, "is_in_memory", False)
    plan = gpucr.plan_dump(job.pid, tmp_path / "store", key=KEY)
    assert any("CRIU's images lie in" in finding.what for finding in plan.findings)
    monkeypatch.setattr(working_folder.WorkingFolder, "is_in_memory", True)
    plan = gpucr.plan_dump(job.pid, tmp_path / "store", key=KEY)
    assert not any("CRIU's images lie in" in finding.what for finding in plan.findings)


def test_where_working_folders_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert working_folder.place(1, 0) == Path(os.environ["TMPDIR"])
    monkeypatch.delenv("TMPDIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("gpucr.linux.memory.available_bytes", lambda: 8 << 30)
    monkeypatch.setattr("gpucr.linux.memory.free_disk_bytes", lambda folder: 16 << 30)
    monkeypatch.setattr("gpucr.linux.memory.lies_in_memory", lambda folder: True)
    assert working_folder.place(1 << 30, 0) == Path("/dev/shm")
    assert working_folder.place(1 << 30, 7 << 30) == tmp_path
    assert working_folder.place(5 << 30, 0) == tmp_path
    with pytest.raises(ValueError, match="no working folder"):
        working_folder.remove(tmp_path)


# --- what goes wrong -------------------------------------------------------------------------------------------


def test_invalid_names_and_locations(counter: CounterFactory, store: Path, tmp_path: Path) -> None:
    job = counter("--mib", "1")
    for name in ("latest", "0123456789abcdef", "a/b"):
        with pytest.raises(gpucr.InvalidRequest):
            gpucr.dump(job.pid, at(store, name))
    (tmp_path / "folder").mkdir()
    with pytest.raises(gpucr.StoreError, match="there is no store at"):
        gpucr.dump(job.pid, at(tmp_path / "folder", "a"))
    with pytest.raises(gpucr.InvalidRequest, match="holds no snapshot"):
        gpucr.restore(store)
    gpucr.dump(job.pid, at(store, "a"), leave_running=True)
    gpucr.dump(job.pid, at(store, "b"), leave_running=True)
    with pytest.raises(gpucr.InvalidRequest, match="holds 2 snapshots"):
        gpucr.open_snapshot(store)
    with pytest.raises(gpucr.InvalidRequest, match="no snapshot 'c'"):
        gpucr.open_snapshot(at(store, "c"))
    assert job.ask() == 101


@pytest.mark.parametrize("leave_running", [later(False), True])
def test_a_full_store_leaves_the_job_unchanged(
    counter: CounterFactory, driver: CudaDriver, store: Path, monkeypatch: pytest.MonkeyPatch, leave_running: bool
) -> None:
    job = counter("--mib", "16", "--fork", "1")
    pids = job.processes()
    gpucr.dump(job.pid, at(store, "before"), leave_running=True)
    job.ask()

    open_new = LocalBackend.open_new

    def full(self: LocalBackend, name: str) -> object:
        if name.startswith("packs/"):
            raise OSError(28, "No space left on device", name)
        return open_new(self, name)

    monkeypatch.setattr(LocalBackend, "open_new", full)
    with pytest.raises(gpucr.StoreError, match="takes no more data"):
        gpucr.dump(job.pid, at(store, "after"), leave_running=leave_running)
    monkeypatch.undo()
    assert job.ask() == 102
    assert {driver.state(pid) for pid in pids} == {RUNNING}
    assert job.send("verify") == "ok"
    assert names(store) == ["before"]
    assert writers.seen(LocalBackend(store)) == {}, "it says that it has given up"


def test_a_failed_commit_leaves_the_job_unchanged(
    counter: CounterFactory, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--mib", "16")
    create = LocalBackend.create

    def refuse(self: LocalBackend, name: str, parts: Any) -> None:
        if name.startswith(writers.SNAPSHOTS_PREFIX) and parts:
            raise OSError(5, "Input/output error", name)
        create(self, name, parts)

    monkeypatch.setattr(LocalBackend, "create", refuse)
    with pytest.raises(gpucr.StoreError):
        gpucr.dump(job.pid, at(store, "a"))
    monkeypatch.undo()
    assert job.ask() == 101
    assert names(store) == []
    gpucr.dump(job.pid, at(store, "a"))
    job.reap()
    assert_comes_back(job, at(store, "a"), 102)


def test_a_dump_declared_dead_leaves_the_job_unchanged(
    counter: CounterFactory, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--mib", "1")

    def end(progress: gpucr.Progress) -> None:
        if (progress.event, progress.phase) == ("begin", "dump"):
            for writer in writers.seen(LocalBackend(store)).values():
                writers.end_dead(Store.open(LocalBackend(store)), writer)  # as a prune does

    with pytest.raises(gpucr.StoreError, match="took this dump for dead"):
        gpucr.dump(job.pid, at(store, "a"), on_progress=end)
    assert job.ask() == 101
    assert names(store) == []


def test_an_unwanted_snapshot_is_removed(counter: CounterFactory, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU fails after the commit, and the job is alive, so the snapshot must go."""
    job = counter("--mib", "1")
    commit = gpucr.operations.dump_steps.commit

    def fail(*arguments: Any) -> Any:
        commit(*arguments)
        raise gpucr.CriuError("it failed", phase="dump")

    monkeypatch.setattr("gpucr.operations.dump_steps.commit", fail)
    with pytest.raises(gpucr.CriuError):
        gpucr.dump(job.pid, at(store, "a"))
    assert job.ask() == 101
    assert names(store) == []


def _pack_with(store: Path, area: str) -> tuple[Path, int]:
    """The pack that holds the first stored piece of an area, and where it lies in it."""
    from gpucr.store import snapshots

    snapshot = opened(store)
    reader = snapshots.open_reader(snapshot.store, snapshot.stored)
    ref = next(ref for ref in snapshot.stored.area(area).pieces(reader) if not ref.is_zero)
    place = reader._places(ref)[0]
    return store / "packs" / place.pack_id.hex()[:2] / place.pack_id.hex(), place.offset


@pytest.mark.parametrize("what", ["device", "images"])
def test_a_flipped_bit_ends_the_restore(counter: CounterFactory, store: Path, what: str) -> None:
    job = counter("--mib", "16")
    report = gpucr.dump(job.pid, at(store, "a"))
    job.reap()
    area = f"device/{job.pid}" if what == "device" else f"images/pages-{_largest_pages(report.snapshot)}.img"
    pack, offset = _pack_with(store, area)
    data = bytearray(pack.read_bytes())
    data[offset] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    with pytest.raises(gpucr.StoreDamaged, match="differs from what was written"):
        gpucr.restore(at(store, "a"))
    assert not job.processes()
    assert gpucr.verify_snapshots(store, deep=True).problems
    data[offset] ^= 1
    pack.write_bytes(data)
    assert_comes_back(job, at(store, "a"), 101)


@pytest.mark.parametrize(
    ("what", "leave_running"),
    [("device", False), ("images", True), later("device", True), later("images", False)],
)
def test_a_dump_rewrites_damaged_pieces(counter: CounterFactory, store: Path, what: str, leave_running: bool) -> None:
    job = counter("--mib", "16")
    first = gpucr.dump(job.pid, at(store, "a"), leave_running=True)
    area = f"device/{job.pid}" if what == "device" else f"images/pages-{_largest_pages(first.snapshot)}.img"
    pack, offset = _pack_with(store, area)
    data = bytearray(pack.read_bytes())
    data[offset] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    # The job has not run in between: CRIU's images are the same but for a page or two, device memory is the same.
    report = gpucr.dump(job.pid, at(store, "b"), leave_running=leave_running)
    assert gpucr.verify_snapshots(at(store, "b"), deep=True).problems == {}
    if what == "device":
        assert report.counts.repaired_bytes > 0
        assert any("were damaged in the store" in warning for warning in report.warnings)
        assert gpucr.verify_snapshots(store, deep=True).problems == {}, "the first one has it back as well"
    if leave_running:
        assert job.ask() == 101
        job.kill()
    else:
        job.reap()
    assert_comes_back(job, at(store, "b"), 101)


def test_a_trusted_store_is_not_read(counter: CounterFactory, store: Path) -> None:
    job = counter("--mib", "16")
    gpucr.dump(job.pid, at(store, "a"), leave_running=True)
    checked = gpucr.dump(job.pid, at(store, "b"), leave_running=True)
    trusted = gpucr.dump(job.pid, at(store, "c"), trust_store=True)
    job.reap()
    assert checked.counts.checked_bytes >= 16 << 20
    assert trusted.counts.checked_bytes == 0
    assert trusted.counts.known_bytes >= 16 << 20
    assert_comes_back(job, at(store, "c"), 101)


def _largest_pages(snapshot: Any) -> str:
    pages = [file for file in snapshot.manifest.files if file.path.startswith("images/pages-")]
    path: str = max(pages, key=lambda file: file.size_bytes).path
    return path.removeprefix("images/pages-").removesuffix(".img")


def test_a_missing_pack_is_reported_before_anything_starts(counter: CounterFactory, store: Path) -> None:
    job = counter("--mib", "16")
    gpucr.dump(job.pid, at(store, "a"))
    job.reap()
    _pack_with(store, f"device/{job.pid}")[0].unlink()
    for index in (store / "index").iterdir():
        index.unlink()
    with pytest.raises(gpucr.StoreDamaged, match="lacks the piece"):
        gpucr.restore(at(store, "a"))
    assert not job.processes()


def test_too_little_host_memory_for_the_staging_file_ends_the_restore(
    counter: CounterFactory, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--mib", "16")
    gpucr.dump(job.pid, at(store, "a"))
    job.reap()
    create = StagingFile.create

    def read_only(*asked: Any) -> StagingFile:
        file = create(*asked)
        again = os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY)
        os.dup2(again, file.fd)
        os.close(again)
        return file

    monkeypatch.setattr(StagingFile, "create", staticmethod(read_only))
    with pytest.raises(gpucr.SnapshotError, match="cannot be put into host memory"):
        gpucr.restore(at(store, "a"))
    monkeypatch.undo()
    assert not job.processes()
    assert_comes_back(job, at(store, "a"), 101)


def test_a_deadline_and_an_interrupt_end_a_restore(counter: CounterFactory, store: Path) -> None:
    job = counter("--mib", "16")
    gpucr.dump(job.pid, at(store, "a"))
    job.reap()

    def interrupt(progress: gpucr.Progress) -> None:
        if (progress.event, progress.phase) == ("begin", "load"):
            raise KeyboardInterrupt

    with pytest.raises(gpucr.Interrupted):
        gpucr.restore(at(store, "a"), on_progress=interrupt)
    with pytest.raises(gpucr.DeadlineExceeded):
        gpucr.restore(at(store, "a"), timeout_s=1e-3)
    assert not job.processes()
    assert_comes_back(job, at(store, "a"), 101)


# --- between stores, and over a network ------------------------------------------------------------------------


@pytest.mark.parametrize("encrypted", [later(False), True])
def test_a_copied_snapshot_is_restored(counter: CounterFactory, store: Path, tmp_path: Path, encrypted: bool) -> None:
    key = KEY if encrypted else None
    target = tmp_path / "target"
    gpucr.init_store(target, key=key)
    job = counter("--mib", "16")
    gpucr.dump(job.pid, at(store, "a"), leave_running=True)
    gpucr.dump(job.pid, at(store, "b"))
    job.reap()
    copied = gpucr.copy_snapshots(store, target, target_key=key)
    assert [each.target.name for each in copied] == ["a", "b"] == names(target, key)
    again = gpucr.copy_snapshots(at(store, "b"), target, target_key=key)
    assert [each.target.id for each in again] == [copied[1].target.id]
    gpucr.remove_snapshot(at(store, "a"))
    assert_comes_back(job, at(target, "a"), 101, key=key)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def s3(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place there, which the environment says how to reach."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/jobs"


def _patience(monkeypatch: pytest.MonkeyPatch, deadline_s: float) -> None:
    patience = Patience(first_wait_s=0.01, longest_wait_s=0.05, deadline_s=deadline_s)
    init = ObjectsBackend.__init__

    def patient(self: ObjectsBackend, url: str, **options: Any) -> None:
        init(self, url, **{"patience": patience, **options})

    monkeypatch.setattr(ObjectsBackend, "__init__", patient)


@long
def test_dump_and_restore_over_failing_connections(
    counter: CounterFactory, server: Server, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--mib", "32")
    store = f"{s3}/cut"
    _patience(monkeypatch, 30)
    # Every fourth connection, in the middle of what it sends or gets.
    with CuttingProxy(server.port, lambda number, request: [None, 40_000, None, -40_000][number % 4]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        gpucr.init_store(store)
        gpucr.dump(job.pid, f"{store}#a", leave_running=True)
        second = gpucr.dump(job.pid, f"{store}#b")
        job.reap()
        assert_only_host_memory_is_new(second)
        assert not gpucr.verify_snapshots(store, deep=True).problems
        assert_comes_back(job, f"{store}#a", 101)
        local = tmp_path / "local"
        gpucr.init_store(local)
        gpucr.copy_snapshots(f"{store}#b", local)
        gpucr.prune_store(store, gpucr.PruneRules(keep_last=1, grace_s=0.0))
        assert names(store) == ["b"]
        assert proxy.cuts
    assert_comes_back(job, str(local), 101)


def test_a_network_failure_leaves_the_job_unchanged(
    counter: CounterFactory, driver: CudaDriver, server: Server, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--mib", "16", "--fork", "1")
    pids = job.processes()
    store = f"{s3}/gone"
    gpucr.init_store(store)
    gpucr.dump(job.pid, f"{store}#before", leave_running=True)
    job.ask()
    _patience(monkeypatch, 0.5)
    limit: int | None = -200_000  # small requests pass, packs do not
    with CuttingProxy(server.port, lambda number, request: limit) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(gpucr.StoreError):
            gpucr.dump(job.pid, f"{store}#after")
        assert proxy.cuts
        assert job.ask() == 102
        assert {driver.state(pid) for pid in pids} == {RUNNING}
        limit = None
        assert names(store) == ["before"]
        gpucr.dump(job.pid, f"{store}#after")
        job.reap()
        limit = 200_000
        with pytest.raises(gpucr.StoreError):
            gpucr.restore(f"{store}#after")
        assert not job.processes()
        limit = None
        assert_comes_back(job, f"{store}#after", 103)


# --- commands --------------------------------------------------------------------------------------------------


def test_everyday_commands(counter: CounterFactory, tmp_path: Path) -> None:
    store, key = tmp_path / "store", tmp_path / "key"
    key.write_bytes(os.urandom(32))
    env = {"GPUCR_KEY_FILE": str(key)}
    assert run_json("store", "init", store, "--encrypt", "--key-file", key)["encrypted"] is True
    job = counter("--mib", "4")
    dumped = run_json("dump", job.pid, "--to", at(store, "a"), "--leave-running", "--encrypt", env=env)
    assert dumped["seen_bytes"] > dumped["written_bytes"] > 4 << 20
    assert {"zero_bytes", "known_bytes", "compressed_saved_bytes"} <= dumped.keys()
    said = run("dump", job.pid, "--to", at(store, "b"), "--compress", "none", env=env)
    assert " of " in said.stdout.splitlines()[-1], said.stderr
    job.reap()
    assert [each["name"] for each in run_json("ls", store, env=env)["snapshots"]] == ["a", "b"]
    assert "WRITTEN" in run("ls", store, env=env).stdout
    assert run_json("inspect", at(store, "b"), env=env)["device_memory"][0]["place"] == "store"
    differences = run_json("diff", at(store, "a"), at(store, "b"), env=env)["differences"]
    assert "images/inventory.img" in [each["name"] for each in differences]
    assert "images/inventory.img" in run("diff", at(store, "a"), at(store, "b"), "-v", env=env).stdout
    assert run_json("verify", store, "--deep", env=env)["damaged"] == {}
    assert "all is there" in run("verify", at(store, "a"), env=env).stdout
    for unset in ({}, {"GPUCR_KEY_FILE": "", "GPUCR_PASSPHRASE": ""}):
        done = run("ls", store, env=unset)
        assert (done.returncode, "no key was given" in done.stderr) == (5, True)
    assert run_json("rm", at(store, "a"), env=env)["removed"][0]["name"] == "a"
    assert [each["name"] for each in run_json("prune", store, "--keep-last", "1", env=env)["kept"]] == ["b"]
    plain = tmp_path / "plain"
    assert run_json("store", "init", plain)["encrypted"] is False
    assert run_json("copy", store, plain, "--to-plain", env=env)["copies"][0]["target"]["name"] == "b"
    again = tmp_path / "again"
    assert run_json("store", "init", again, "--encrypt", env=env)["encrypted"] is True
    assert "is not encrypted" in run("copy", plain, again, env=env).stderr
    assert run_json("copy", plain, again, "--from-plain", env=env)["copies"][0]["target"]["name"] == "b"
    restored = run_json("restore", f"{plain}#latest")
    assert restored["snapshot"] == opened(plain).where
    assert job.ask() == 101


def test_a_full_disk_is_foreseen(counter: CounterFactory, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything changes, as for a folder."""
    job = counter("--mib", "16")
    real = memory.free_disk_bytes
    free_bytes = 1 << 20
    monkeypatch.setattr(memory, "free_disk_bytes", lambda folder: free_bytes if folder == store else real(folder))
    with pytest.raises(gpucr.Unsupported, match=r"has 1\.0 MiB free") as caught:
        gpucr.dump(job.pid, at(store, "a"))
    assert caught.value.code == "GPUCR-NO-SPACE"
    assert job.ask() == 101
    assert list(store.rglob("packs/*/*")) == list(store.rglob("writers/*")) == []
    free_bytes = 70 << 20  # more than the margin: compression may save the rest, and an empty store cannot
    assert [each.severity for each in gpucr.plan_dump(job.pid, at(store, "a")).findings if each.code] == ["warning"]
    plan = gpucr.plan_dump(job.pid, at(store, "a"), compress="none")
    assert [each.severity for each in plan.findings if each.code == "GPUCR-NO-SPACE"] == ["blocking"]


@pytest.mark.parametrize("name", ["GPUCR_KEY_FILE", "GPUCR_PASSPHRASE"])
def test_a_key_in_the_environment_does_not_affect_a_plain_folder(
    process_without_cuda: int, tmp_path: Path, name: str
) -> None:
    to, pid, env = str(tmp_path / "plain"), str(process_without_cuda), {name: "/no/such/file"}
    assert run("dump", pid, "--to", to, "--dry-run", env=env).returncode == 0
    assert run("dump", pid, "--to", to, "--leave-running", env=env).returncode == 0
    assert run("inspect", to, env=env).returncode == 0
    (tmp_path / "key").write_bytes(bytes(32))
    refused = run("dump", pid, "--to", f"{to}-2", "--key-file", str(tmp_path / "key"), env=env)
    assert refused.returncode == 2
    assert "is not a store" in refused.stderr


def test_a_damaged_snapshot_gives_exit_code_5(process_without_cuda: int, store: Path, tmp_path: Path) -> None:
    gpucr.dump(process_without_cuda, at(store, "a"), leave_running=True)
    gpucr.dump(process_without_cuda, tmp_path / "folder", leave_running=True)
    assert run("verify", tmp_path / "folder").returncode == 0
    (image,) = (tmp_path / "folder" / "images").glob("inventory.img")
    image.write_bytes(bytes(image.stat().st_size))
    for pack in (store / "packs").glob("*/*"):
        pack.unlink()
    for place in (store, at(store, "a"), tmp_path / "folder"):
        done = run("verify", place)
        assert (done.returncode, done.stdout) == (5, "")
        assert "damaged: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("rm", "{store}"), "names no snapshot"),
        (("ls", "{store}/nothing"), "does not exist"),
        (("store", "init", "{store}"), "there is a store at"),
        (("store", "init", "{store}#a"), "names a snapshot"),
        (("store", "init", "{store}/packs"), "is not empty"),
        (("store", "init", "{store}/a/b"), "cannot be made"),
        (("prune", "{store}#a"), "names a snapshot"),
        (("prune", "{store}", "--keep-within", "7y"), "is not a time"),
        (("prune", "{store}", "--keep-last", "0"), "0 is not in the range x>=1"),
        (("diff", "{store}#a", "{store}/.."), "holds no"),
        (("store", "init", "{store}2", "--key-file", "/nonexistent"), "cannot be read"),
        (("store", "init", "{store}2", "--encrypt"), "no key was given"),
        (("verify", "ftp://host/path"), "is no place for a store"),
    ],
)
def test_invalid_requests_are_reported(store: Path, arguments: tuple[str, ...], said: str) -> None:
    (store / "packs" / "ab").mkdir(parents=True)
    done = run(*(text.format(store=store) for text in arguments))
    assert done.returncode in (2, 5)
    assert said in done.stderr
