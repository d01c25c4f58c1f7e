"""Stacks of backends (gpu_state/order.py), tested with a kind whose memory is never a file: example_holder.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

import gpucr
from gpucr.driver.cuda import CudaDriver
from gpucr.errors import DriverError, Unsupported
from gpucr.gpu_state import kinds
from gpucr.gpu_state.captured import CapturedStaging
from gpucr.linux import capabilities
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import CudaState, DevicePart
from gpucr.snapshot.location import Place
from gpucr.undo.steps import Meter
from tests.conftest import skip_or_fail
from tests.counter import Counter, CounterFactory
from tests.gpu_state.example_holder import MIB, SIZE_BYTES, Vault
from tests.storm import later

RUNNING = CudaState.RUNNING

pytestmark = pytest.mark.criu


@pytest.fixture(autouse=True)
def as_root() -> None:
    if not capabilities.can_checkpoint_processes():
        skip_or_fail("root", "dumps need root")


@pytest.fixture
def vault() -> Iterator[Vault]:
    kind = Vault()
    kinds.register(kind)
    yield kind
    kinds.unregister(kind.name)


@pytest.fixture
def calls(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What the vault and the driver did, in the order in which it was done."""

    def noted(action: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(self: CudaDriver, pid: int, *arguments: object) -> None:
            if action == "unlock":  # what matters is when it begins, else when it has ended
                vault.log.append((action, pid))
            real(self, pid, *arguments)
            if action != "unlock":
                vault.log.append((action, pid))

        return call

    for action in ("lock", "checkpoint", "restore", "unlock"):
        monkeypatch.setattr(CudaDriver, action, noted(action, getattr(CudaDriver, action)))
    return vault.log


@pytest.fixture(params=["folder", later("store")])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return tmp_path / "snapshot"
    gpucr.init_store(tmp_path / "store")
    return f"{tmp_path / 'store'}#snapshot"


def only_plain_for(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = CapturedStaging._file_to_capture

    def file_to_capture(self: CapturedStaging, meter: Meter) -> StagingFile | None:
        return None if self.part.pid == pid else real(self, meter)

    monkeypatch.setattr(CapturedStaging, "_file_to_capture", file_to_capture)


def assert_all_run(job: Counter, driver: CudaDriver, vault: Vault) -> None:
    assert [driver.state(pid) for pid in job.processes()] == [RUNNING] * len(job.processes())
    assert job.send("verify") == "ok"
    for pid in vault.addresses:
        vault.assert_is_there(pid)


def test_a_gang_with_different_backends_is_dumped_and_restored(
    counter: CounterFactory, vault: Vault, place: Place, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vault over captured staging holds one process's memory, CRIU in the plain way the other's."""
    job = counter("--mib", "8", "--fork", "1")
    root, child = job.processes()
    vault.fill(root)
    only_plain_for(child, monkeypatch)
    snapshot = gpucr.dump(job.pid, place).snapshot
    job.reap()
    snapshot.verify()
    assert snapshot.manifest.kinds == {DevicePart(root): "captured", DevicePart(root, 1): "vault"}
    held = snapshot.manifest.device_parts[DevicePart(root, 1)]
    assert (held.size_bytes, held.stored_bytes) == (SIZE_BYTES, SIZE_BYTES - 4 * MIB)
    assert [each.device_data for each in snapshot.manifest.processes if each.pid == child] == [None]
    if isinstance(place, Path):
        assert (place / "device" / f"{root}-1.0").stat().st_size > 0
        images = b"".join(path.read_bytes() for path in (place / "images").iterdir())
        assert vault.contents[root][:64] not in images, "CRIU has written what the vault held"
    (device,) = [each.memory for each in gpucr.inspect(place).processes if each.pid == root]
    assert [use.mapped_bytes for use in device if use.kind == "device"][1:] == [SIZE_BYTES]
    gpucr.restore(place)
    assert job.processes() == [root, child]
    assert_all_run(job, driver, vault)


def test_vaults_with_plain_staging(
    counter: CounterFactory, vault: Vault, place: Place, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = counter("--mib", "8")
    vault.fill(job.pid)
    only_plain_for(job.pid, monkeypatch)
    snapshot = gpucr.dump(job.pid, place).snapshot
    job.reap()
    assert snapshot.manifest.kinds == {DevicePart(job.pid, 1): "vault"}
    gpucr.restore(place)
    assert_all_run(job, driver, vault)


def places_of(log: Sequence[tuple[str, int]], action: str) -> list[int]:
    return [place for place, (done, _) in enumerate(log) if done == action]


def assert_in_order(log: Sequence[tuple[str, int]], *actions: str) -> None:
    for first, second in pairwise(actions):
        assert max(places_of(log, first)) < min(places_of(log, second)), f"{second} before all of {first}: {log}"


def test_no_process_runs_while_anothers_memory_is_away(
    counter: CounterFactory, calls: list[tuple[str, int]], vault: Vault, tmp_path: Path, driver: CudaDriver
) -> None:
    job = counter("--mib", "8", "--fork", "2")
    held = job.processes()[:2]
    for pid in held:
        vault.fill(pid)
    gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    first_away = min(places_of(calls, "begin"))
    assert_in_order(calls[max(places_of(calls[:first_away], "lock")) :], "lock", "begin", "away", "checkpoint")
    assert_in_order(calls[first_away:], "checkpoint", "complete", "restore", "give_back", "unlock")
    assert len(places_of(calls, "away")) == len(places_of(calls, "give_back")) == 2
    assert_all_run(job, driver, vault)
    gpucr.dump(job.pid, tmp_path / "t")
    job.reap()
    del calls[:]
    gpucr.restore(tmp_path / "t")
    assert_in_order(calls, "restore", "give_back", "unlock")
    assert_all_run(job, driver, vault)


@pytest.mark.parametrize("fails", [later("begin"), "checkpoint", later("give_back")])
def test_a_failure_leaves_every_process_unchanged(
    fails: str, counter: CounterFactory, calls: list[tuple[str, int]], vault: Vault, tmp_path: Path,
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    job = counter("--mib", "8", "--fork", "1")
    for pid in job.processes():
        vault.fill(pid)
    last = job.processes()[-1]
    if fails == "checkpoint":
        real = CudaDriver.checkpoint

        def checkpoint(self: CudaDriver, pid: int) -> None:
            if pid == last:
                raise DriverError("no", pid=pid, action="checkpoint", result=801)
            real(self, pid)

        monkeypatch.setattr(CudaDriver, "checkpoint", checkpoint)
    else:
        vault.fails[fails].append(last)
    with pytest.raises(gpucr.GpucrError, match="no" if fails == "checkpoint" else f"the vault fails to {fails}"):
        gpucr.dump(job.pid, tmp_path / "s", leave_running=True)
    assert not (tmp_path / "s").exists()
    assert (len(places_of(calls, "abort")) > 0) == (fails != "give_back")
    away = {pid for action, pid in calls if action == "away"}
    assert away <= {pid for action, pid in calls if action == "give_back"}
    assert_in_order(calls[max(places_of(calls, "begin")) :], "give_back", "unlock")
    assert_all_run(job, driver, vault)
    assert job.ask() == 101


def test_a_missing_backend_is_refused_before_anything_starts(
    counter: CounterFactory, vault: Vault, place: Place, driver: CudaDriver
) -> None:
    job = counter("--mib", "8")
    vault.fill(job.pid)
    gpucr.dump(job.pid, place)
    job.reap()
    kinds.unregister(vault.name)
    try:
        with pytest.raises(
            Unsupported, match=f"process {job.pid} was held by 'vault', which this gpucr does not"
        ) as caught:
            gpucr.restore(place, force=True)
        assert caught.value.code == "GPUCR-BACKEND"
    finally:
        kinds.register(vault)
    vault.lacks = "its daemon does not run"
    with pytest.raises(Unsupported, match="cannot come back here: its daemon does not run") as caught:
        gpucr.restore(place, force=True)
    assert caught.value.code == "GPUCR-BACKEND"
    assert job.processes() == []
    vault.lacks = None
    gpucr.restore(place)
    assert_all_run(job, driver, vault)


def test_damage_in_an_outer_backends_data_ends_the_half_restored_job(
    counter: CounterFactory, vault: Vault, tmp_path: Path, driver: CudaDriver
) -> None:
    job = counter("--mib", "8", "--fork", "1")
    pids = job.processes()
    vault.fill(pids[1])
    gpucr.dump(job.pid, tmp_path / "s").snapshot.verify()
    job.reap()
    stripe = tmp_path / "s" / "device" / f"{pids[1]}-1.2"
    content = bytearray(stripe.read_bytes())
    content[100] ^= 1
    stripe.write_bytes(content)
    with pytest.raises(gpucr.SnapshotDamaged, match=rf"device/{pids[1]}-1\.2.*differs"):
        gpucr.restore(tmp_path / "s")
    assert job.processes() == []
    content[100] ^= 1
    stripe.write_bytes(content)
    gpucr.restore(tmp_path / "s")
    assert_all_run(job, driver, vault)


def test_plain_and_captured_snapshots_are_interchangeable(
    counter: CounterFactory, tmp_path: Path, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot taken one way is restored where only the other is possible, and dumped there."""
    job = counter("--mib", "8")
    expected = 101
    for number, plain in enumerate((True, False, True)):
        with monkeypatch.context() as patch:
            if plain:
                only_plain_for(job.pid, patch)
            snapshot = gpucr.dump(job.pid, tmp_path / str(number)).snapshot
        job.reap()
        assert snapshot.manifest.kinds == ({} if plain else {DevicePart(job.pid): "captured"})
        gpucr.restore(tmp_path / str(number))
        assert driver.state(job.pid) is RUNNING
        assert job.send("verify") == "ok"
        assert job.ask() == expected
        expected += 1


@pytest.mark.parametrize("name", ["captured", "plain", "vault", "", "Vault", "../vault", "v" * 33])
def test_a_reserved_backend_name_is_refused(name: str, vault: Vault) -> None:
    other = Vault()
    other.name = name
    with pytest.raises(ValueError, match="no kind can be called"):
        kinds.register(other)
