"""The comparing benchmark: its results, its refusals, and that it detects errors."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks import compare, limits, machine, plot, summary, tools
from benchmarks.compare import Comparison
from benchmarks.limits import Limits
from benchmarks.machine import Place
from benchmarks.summary import MEASURED, Measurement, SizeResult
from benchmarks.target import TargetFailed
from benchmarks.tools import Outcome, PlainTools, Tool
from gpucr import Phase
from gpucr.criu.install import find_criu
from gpucr.driver.cuda import load_driver
from gpucr.linux import memory
from tests.benchmarks.whole import results_of
from tests.storm import long

GIB = 2**30
LIMITS = Limits(
    disk_write=2.0 * GIB,
    disk_read=4.0 * GIB,
    disk_bytes=4 * GIB,
    disk_direct=True,
    bus_to_device=None,
    bus_to_host=None,
    memory_copy=20.0 * GIB,
)


def measured(tool: str, what: str, *seconds: float, size_bytes: int = 0, **phases: float) -> list[Measurement]:
    own = tuple(Phase(name, phase_s) for name, phase_s in phases.items())
    return [Measurement(tool, what, number, s, Outcome(own, size_bytes)) for number, s in enumerate(seconds)]


@pytest.fixture
def result() -> SizeResult:
    return SizeResult(
        8.0,
        measurements=[
            *measured("plain", "suspend", 9.0, 6.0, 7.0),
            *measured("gpucr", "suspend", 2.0, 99.0, 1.0),
            *measured("plain", "resume", 4.0, 4.0, 4.0),
            *measured("gpucr", "resume", 3.0, 3.0, 3.0, restore=2.5),
            *measured("gpucr", "dump", 6.0, 6.1, 6.2, size_bytes=8 * GIB, lock=0.1, checkpoint=2.0),
            *measured("gpucr", "restore", 4.0, 4.0, 4.0, criu=1.0, restore=3.4),
            *measured("gpucr", "downtime", 6.5, 6.5, 6.5),
        ],
    )


# --- what times come to ----------------------------------------------------------------------------------------


def test_medians_and_ratios_use_only_sizes_measured_with_both(result: SizeResult) -> None:
    middle = summary.medians(result)
    assert middle["plain"] == {"suspend": 7.0, "resume": 4.0}
    assert middle["gpucr"] == {"suspend": 2.0, "resume": 3.0, "dump": 6.1, "restore": 4.0, "downtime": 6.5}
    assert summary.ratios(middle) == {"suspend": 3.5, "resume": pytest.approx(4 / 3)}


def test_a_dump_is_compared_with_checkpoint_and_storage(result: SizeResult) -> None:
    check = summary.checks(result, LIMITS)["dump"]
    assert check.limit_s == pytest.approx(2.0 + 8 / 2)
    assert check.allowed_s == pytest.approx(1.1 * 6.0)
    assert check.holds


def test_a_restore_is_compared_with_the_driver_alone_or_storage(result: SizeResult) -> None:
    check = summary.checks(result, LIMITS)["restore"]
    assert check.limit_s == pytest.approx(2.5 + 1.0 + 0.5)  # the driver's time without waiting for data
    slow_disk = summary.checks(result, Limits(**{**vars(LIMITS), "disk_read": 1.0 * GIB}))["restore"]
    assert slow_disk.limit_s == pytest.approx(8.0 + 1.0 + 0.5)


def test_a_downtime_is_compared_with_suspend_and_resume(result: SizeResult) -> None:
    check = summary.checks(result, LIMITS)["downtime"]
    assert check.limit_s == check.allowed_s == pytest.approx(2.0 + 3.0 + 1.0)
    assert not check.holds


def test_unmeasured_values_are_not_checked(result: SizeResult) -> None:
    result.measurements = [m for m in result.measurements if m.what not in ("suspend", "dump")]
    assert summary.checks(result, LIMITS) == {}


def test_json_starts_with_the_largest_measured_size(result: SizeResult) -> None:
    small = SizeResult(1.0, measurements=measured("gpucr", "suspend", 1.0, 1.0, 1.0))
    skipped = SizeResult(64.0, skipped="too large")
    data = compare.as_json([small, result, skipped], LIMITS, {"rounds": 3})
    assert data["gib"] == [1.0, 8.0, 64.0]
    assert data["ratios"]["suspend"] == 3.5
    assert data["limits"]["disk_write_bytes_per_s"] == 2.0 * GIB
    assert data["times"]["gpucr"]["suspend"] == [2.0, 99.0, 1.0]
    assert [phase["name"] for phase in data["phases"]["gpucr"]["dump"][0]] == ["lock", "checkpoint"]
    assert data["sizes"][1]["medians"] == data["medians"]
    assert data["sizes"][2] == {"gib": 64.0, "skipped": "too large"}
    assert data["ok"] is True
    assert json.loads(json.dumps(data)) == data

    result.failures.append("device memory is not what it was")
    alone = compare.as_json([result], LIMITS, {})
    assert alone["ok"] is False
    assert "sizes" not in alone


def test_a_plot_is_a_picture(result: SizeResult, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plot.png"
    sizes = compare.as_json([result, SizeResult(64.0, skipped="too large")], LIMITS, {})["sizes"]
    plot.draw(sizes, "title", picture)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


# --- rounds ----------------------------------------------------------------------------------------------------


class _FakeTool:
    """Does nothing, and notes what it was asked to do."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.environment: Mapping[str, str] = {}
        self.calls = calls

    def _called(self, what: str, folder: Path | None = None) -> Outcome:
        self.calls.append(f"{self.name} {what}")
        if folder is not None:
            folder.mkdir(exist_ok=True)
        return Outcome((), downtime_s=0.125)

    def suspend(self, pid: int) -> Outcome:
        return self._called("suspend")

    def resume(self, pid: int) -> Outcome:
        return self._called("resume")

    def dump(self, pid: int, folder: Path) -> Outcome:
        return self._called("dump", folder)

    def dump_leave_running(self, pid: int, folder: Path) -> Outcome:
        return self._called("downtime", folder)

    def restore(self, folder: Path, pid: int) -> Outcome:
        return self._called("restore")


class _FakeTarget:
    """A program that is wrong after its checks have been used up."""

    pid = 1

    def __init__(self, checks: list[bool]) -> None:
        self._checks = checks

    def check(self) -> None:
        if self._checks and not self._checks.pop(0):
            raise TargetFailed("device memory is not what it was")

    def wait_until_gone(self) -> None:
        pass


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the checks of the targets will find, in order; when the list is empty, all is well."""
    found: list[bool] = []

    @contextlib.contextmanager
    def running_target(folder: Path, gib: float, tool: Tool) -> Iterator[_FakeTarget]:
        yield _FakeTarget(found)

    monkeypatch.setattr(compare, "running_target", running_target)
    return found


def _run(tmp_path: Path, wanted: frozenset[str], rounds: int) -> tuple[list[str], SizeResult]:
    calls: list[str] = []
    result = SizeResult(1.0)
    tools_of_both = (_FakeTool("plain", calls), _FakeTool("gpucr", calls))
    Comparison(Place(tmp_path, "tmpfs"), wanted, result).run(tools_of_both, rounds)
    assert list(tmp_path.iterdir()) == []
    return calls, result


def test_rounds_alternate_which_tool_goes_first(checks: list[bool], tmp_path: Path) -> None:
    calls, result = _run(tmp_path, frozenset({"suspend"}), 3)
    assert [call.split()[0] for call in calls if call.endswith("suspend")] == [
        "plain", "gpucr", "gpucr", "plain", "plain", "gpucr",
    ]  # fmt: skip
    assert len(result.of("plain", "suspend")) == len(result.of("gpucr", "suspend")) == 3
    assert result.of("gpucr", "resume") == []


@pytest.mark.parametrize(
    ("wanted", "done"),
    [
        ("resume", ["suspend", "resume"]),
        ("restore", ["dump", "restore"]),
        ("dump", ["dump", "restore"]),  # a dump that cannot be restored proves nothing
        ("downtime", ["downtime"]),
    ],
)
def test_setup_runs_but_is_not_timed(checks: list[bool], tmp_path: Path, wanted: str, done: list[str]) -> None:
    calls, result = _run(tmp_path, frozenset({wanted}), 1)
    assert calls == [f"{tool} {what}" for tool in ("plain", "gpucr") for what in done]
    assert {m.what for m in result.measurements} == {wanted}


def test_downtime_is_as_the_tool_reports_it(checks: list[bool], tmp_path: Path) -> None:
    _, result = _run(tmp_path, frozenset({"downtime"}), 1)
    assert [m.seconds for m in result.measurements] == [0.125, 0.125]


def test_a_mismatch_is_recorded_and_ends_only_that_tools_round(checks: list[bool], tmp_path: Path) -> None:
    checks += [True, False]  # the plain tool: right after the resume, wrong after the dump that left it running
    calls, result = _run(tmp_path, frozenset(MEASURED), 1)
    assert calls == [
        "plain suspend", "plain resume", "plain downtime",
        "gpucr suspend", "gpucr resume", "gpucr downtime", "gpucr dump", "gpucr restore",
    ]  # fmt: skip
    assert result.failures == ["1 GiB, round 1 of 1, plain: device memory is not what it was"]


# --- the machine -----------------------------------------------------------------------------------------------


def test_a_memory_backed_folder_is_recognised() -> None:
    assert machine.place_of(Path("/dev/shm")).in_memory
    assert machine.place_of(Path("/proc/self")).file_system == "proc"


def test_too_little_room_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path, "ext4")
    assert "host memory" in str(machine.lack_of_room(2**50, place))
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**60)
    assert "room in" in str(machine.lack_of_room(2**50, place))
    monkeypatch.setattr(memory, "free_disk_bytes", lambda folder: 2**60)
    assert "device memory" in str(machine.lack_of_room(2**50, place))


def test_images_in_memory_count_as_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 * GIB)
    monkeypatch.setattr(memory, "free_disk_bytes", lambda folder: 64 * GIB)
    monkeypatch.setattr(machine, "is_simulated", lambda: True)
    assert machine.lack_of_room(GIB + GIB // 4, Place(tmp_path, "ext4")) is None
    assert "host memory" in str(machine.lack_of_room(GIB + GIB // 4, Place(tmp_path, "tmpfs")))


def test_host_memory_is_warmed_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 100 * GIB)
    assert machine.warm_size_bytes(None, 8.0) == 20 * GIB
    assert machine.warm_size_bytes(None, 64.0) == 70 * GIB
    assert machine.warm_size_bytes(0.0, 8.0) == 0


# --- limits ----------------------------------------------------------------------------------------------------

LEAST_DISK_BYTES = limits.DISK_FILES * limits.PIECE_BYTES


def test_measuring_storage_leaves_nothing_behind(tmp_path: Path) -> None:
    run = limits.disk_once(tmp_path, 1)
    assert run.size_bytes == LEAST_DISK_BYTES
    assert run.written_bytes_per_s > 0
    assert run.read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


@long
def test_storage_without_direct_io_is_measured_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def refuse_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        fd = really_open(path, flags & ~os.O_DIRECT, mode)
        if flags & os.O_DIRECT:
            os.close(fd)
            raise OSError(errno.EINVAL, "no direct I/O here")
        return fd

    monkeypatch.setattr(os, "open", refuse_direct)
    assert not limits.disk_once(tmp_path, 1).direct
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, pieces: list[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="no room"):
        limits.disk_once(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_memory_is_measured_and_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MEMORY_BYTES_PER_THREAD", 1 << 20)
    assert limits.memory_copy_bytes_per_s() > 0
    limits.warm(8 << 20)


def test_a_measurement_that_fails_in_its_process_gives_the_reason(sim_only: None) -> None:
    with pytest.raises(limits.LimitFailed, match=r"'bus' failed: .*cuMemAllocHost_v2"):
        limits.in_child("bus")  # the simulator has no pinned memory


# --- the tools -------------------------------------------------------------------------------------------------


def test_holes_do_not_count_as_written(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 20)
        file.write(b"x" * 4096)
    tools.sync_files(tmp_path)
    assert 0 < tools.disk_bytes(tmp_path) <= 64 << 10


def test_a_failed_criu_shows_its_log_and_is_cleaned_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\n")
    started: list[int] = []
    with pytest.raises(tools.CriuFailed, match="criu ended with 3:\none\ntwo"):
        tools.run_criu([sys.executable, "-c", "raise SystemExit(3)"], log, on_failure=started.append)
    assert len(started) == 1


class _Vandal(PlainTools):
    """Flips one bit of device memory while it lies in staging."""

    def suspend(self, pid: int) -> Outcome:
        outcome = super().suspend(pid)
        staging = max(
            (mapping for mapping in memory.read_maps(pid) if mapping.is_private_anonymous),
            key=lambda mapping: mapping.end - mapping.start,
        )
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as bytes_of:
            bytes_of.seek(staging.end - (1 << 20))
            byte = bytes_of.read(1)
            bytes_of.seek(-1, os.SEEK_CUR)
            bytes_of.write(bytes([byte[0] ^ 1]))
        return outcome


@pytest.mark.criu
def test_a_changed_bit_is_detected(sim_only: None, tmp_path: Path) -> None:
    result = SizeResult(1 / 64)
    Comparison(machine.place_of(tmp_path), frozenset({"suspend"}), result).run(
        (_Vandal(load_driver(), find_criu()),), 1
    )
    assert len(result.failures) == 1
    assert "device memory is not what it was: the program says 'corrupt'" in result.failures[0]


# --- all of it -------------------------------------------------------------------------------------------------


@long
@pytest.mark.criu
def test_the_whole_comparison_where_no_driver_is_found(sim_only: None, tmp_path: Path) -> None:
    simulators = {"LD_LIBRARY_PATH", "GPUCR_SIM_STATE", "GPUCR_SIM_GPUS"}
    env = {name: value for name, value in os.environ.items() if name not in simulators}
    temporary = tmp_path / "temporary"
    images = tmp_path / "images"
    temporary.mkdir()
    images.mkdir()
    small = ("--gib", "0.015625", "--limit-gib", "0.1", "--warm-gib", "0")
    data = results_of("compare", *small, "--to", images, env={**env, "TMPDIR": str(temporary)})
    assert data["schema"] == "gpucr.benchmark.compare"
    assert data["ok"] is True
    assert data["hardware"]["simulated"] is True
    assert set(data["ratios"]) == set(MEASURED)
    assert all(len(times) == 3 for tool in ("plain", "gpucr") for times in data["times"][tool].values())
    assert set(data["checks"]) == {"dump", "restore", "downtime"}
    assert data["staging_bytes"] >= 16 << 20
    assert min(data["image_bytes"]["gpucr"]["dump"]) >= 16 << 20  # random bytes: nothing can be left out
    assert list(images.iterdir()) == []
    assert list(temporary.iterdir()) == []
