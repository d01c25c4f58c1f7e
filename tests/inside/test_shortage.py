"""No room on a disk, no inodes, no pids, no memory: each command fails with what is missing, and the job runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import command
from tests.counter import wait_until
from tests.inside.conftest import is_running, sh

_MIB = 1 << 20
_SIZES_MIB = {"ext4": 100, "xfs": 300, "btrfs": 250}


@pytest.fixture(params=sorted(_SIZES_MIB))
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A small file system with a store, and a folder for gpucr's state."""
    image, place = tmp_path / "image", tmp_path / "full"
    place.mkdir()
    kind = request.param
    sh(
        f"truncate --size {_SIZES_MIB[kind]}M {image}; mkfs.{kind} -q {image}; mount -o loop {image} {place}; "
        f"mkdir {place}/state"
    )
    assert command.run("store", "init", place / "store").returncode == 0
    yield place
    sh(f"umount {place}")


@pytest.fixture
def full(small: Path) -> Path:
    """A file system without room."""
    _fill(small)
    return small


def _fill(place: Path) -> None:
    sh(f"dd if=/dev/zero of={place}/filler bs=64K 2>/dev/null || true; sync")
    with contextlib.suppress(OSError):  # btrfs has small files elsewhere
        for number in itertools.count():
            (place / f"filler-{number}").write_bytes(bytes(1500))


def test_no_room_for_a_snapshot(full: Path, job: str) -> None:
    for place in (full / "snapshot", full / "store#snapshot"):
        done = command.run("dump", job, "--to", place)
        assert done.returncode in (3, 4), done.stderr
        assert "space" in done.stderr or "room" in done.stderr
        assert is_running(job)


def test_no_room_for_gpucr_s_state(full: Path) -> None:
    done = command.run("run", "--name", "one", "--", "sleep", "1", env={"XDG_STATE_HOME": str(full / "state")})
    assert done.returncode not in (0, 1, 10), done.stderr
    assert "space" in done.stderr or "room" in done.stderr


def test_a_full_file_system_is_read_and_freed(small: Path, tmp_path: Path, job: str) -> None:
    """Snapshots on it can be listed, verified, copied and restored. Removing one makes room for another."""
    full_state = {"XDG_STATE_HOME": str(small / "state")}

    def does(*words: object, code: int = 0, env: dict[str, str] | None = None) -> str:
        done = command.run(*words, env=env)
        assert done.returncode == code, (words, done.stderr)
        return done.stdout + done.stderr

    does("dump", job, "--leave-running", "--to", small / "folder")
    for name in ("one", "two"):
        does("dump", job, "--leave-running", "--to", f"{small}/store#{name}")
    _fill(small)
    for words in (
        ("ls", small / "store"),
        ("jobs",),
        ("verify", "--deep", small / "store"),
        ("verify", "--deep", small / "folder"),
        ("inspect", f"{small}/store#one"),
        ("diff", f"{small}/store#one", f"{small}/store#two"),
    ):
        does(*words, env=full_state)
    does("store", "init", tmp_path / "other")
    does("copy", small / "store", tmp_path / "other", env=full_state)
    for place in (small / "folder", f"{small}/store#two"):
        does("restore", place, "--clone", "--name", "restored")
        wait_until(lambda: is_running("restored"), "the job to run", timeout_s=120)
        does("kill", "restored")
    done = command.run("restore", small / "folder", "--clone", "--json", env=full_state)
    assert "space" in done.stderr
    if done.returncode == 0:  # btrfs had room for the first of the registry's files
        with contextlib.suppress(ProcessLookupError):  # its log is there as well
            os.kill(command.parsed(done.stdout)["pid"], signal.SIGKILL)
    else:
        assert done.returncode == 3, done.stderr

    does("rm", f"{small}/store#one", env=full_state)
    does("rm", f"{small}/store#two", env=full_state)
    done = command.run("prune", small / "store", "--grace", "0s", env=full_state)
    if done.returncode != 0:
        assert "free 1 MiB" in done.stderr
        sh(f"truncate --size -1M {small}/filler")
        does("prune", small / "store", "--grace", "0s", env=full_state)
    does("prune", small / "store", "--grace", "0s", env=full_state)  # what was retired is deleted
    assert sum(path.stat().st_size for path in (small / "store").rglob("*") if path.is_file()) < _MIB
    sh(f"rm -f {small}/filler*")
    does("dump", job, "--leave-running", "--to", f"{small}/store#three")
    does("verify", "--deep", small / "store")
    assert is_running(job)


def test_no_inodes_for_a_snapshot(tmp_path: Path, job: str) -> None:
    image, place = tmp_path / "image", tmp_path / "full"
    place.mkdir()
    sh(f"truncate --size 64M {image}; mkfs.ext4 -q -N 16 {image}; mount -o loop {image} {place}")
    sh(f"for n in $(seq 99); do : >{place}/$n || break; done 2>/dev/null; true")
    try:
        done = command.run("dump", job, "--to", place / "snapshot")
        assert done.returncode in (3, 4), done.stderr
        assert "Traceback" not in done.stderr
        assert is_running(job)
    finally:
        sh(f"umount {place}")


def test_no_pids(tmp_path: Path, job: str) -> None:
    before = Path("/proc/sys/kernel/pid_max").read_text()
    command.run("jobs")  # what this loads is there then
    highest = max(int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    Path("/proc/sys/kernel/pid_max").write_text(str(max(highest + 2, 301)))
    fillers: list[subprocess.Popen[bytes]] = []
    try:
        while True:
            try:
                fillers.append(subprocess.Popen(["/bin/sleep", "infinity"]))
            except OSError:
                break
        for filler in fillers[:1]:
            filler.kill()
            filler.wait()
        done = command.run("dump", job, "--to", tmp_path / "snapshot")
    finally:
        for filler in fillers[1:]:
            filler.kill()
            filler.wait()
        Path("/proc/sys/kernel/pid_max").write_text(before)
    assert done.returncode in (3, 4, 5), done.stderr
    assert "Traceback" not in done.stderr
    assert is_running(job)


def test_a_dump_within_the_memory_that_preflight_demands(tmp_path: Path, job: str) -> None:
    """Version 2's limit: the job is not in it, gpucr and CRIU are."""
    done = subprocess.run(
        [
            *("systemd-run", "--quiet", "--collect", "--pipe", "--wait", "--property=MemoryMax=160M"),
            *("--property=MemorySwapMax=0", f"--setenv=PATH={sh('echo -n $PATH')}", "--setenv=HOME=/root"),
            *("gpucr", "dump", job, "--leave-running", "--to", str(tmp_path / "snapshot")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert is_running(job)


# --- memory of the machine -------------------------------------------------------------------------------------

_CHECKS = """
import os, time, zlib
data = os.urandom(48 << 20)
expected = zlib.crc32(data)
number = 0
while True:
    assert zlib.crc32(data) == expected
    number += 1
    print(number, flush=True)
    time.sleep(0.5)
"""
_FILLS = """
import sys, time
held = []
def available():
    return next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemAvailable:"))
while available() > 60 << 10:
    held.append(b"1" * (4 << 20))
print("filled", flush=True)
time.sleep(3600)
"""


def test_a_machine_without_memory_refuses_a_dump(tmp_path: Path, job: str) -> None:
    with subprocess.Popen([sys.executable, "-c", _FILLS], stdout=subprocess.PIPE, text=True) as filler:
        try:
            assert filler.stdout is not None
            assert filler.stdout.readline() == "filled\n"
            done = command.run("dump", job, "--to", tmp_path / "snapshot")
        finally:
            filler.kill()
    assert done.returncode == 3, done.stderr
    assert "GPUCR-HOST-MEMORY" in done.stderr
    assert is_running(job)


def test_the_kernel_kills_a_dump_for_lack_of_memory(tmp_path: Path, job: str) -> None:
    """What preflight would refuse, forced: gpucr and CRIU are killed with all that they have started."""
    done = subprocess.run(
        [
            *("systemd-run", "--quiet", "--collect", "--pipe", "--wait", "--property=MemoryMax=16M"),
            *("--property=MemorySwapMax=0", f"--setenv=PATH={sh('echo -n $PATH')}", "--setenv=HOME=/root"),
            *("gpucr", "dump", job, "--force", "--to", str(tmp_path / "snapshot")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    wait_until(lambda: is_running(job), "the job to run on", timeout_s=120)
    count = len(command.run("logs", job).stdout.split())
    wait_until(lambda: len(command.run("logs", job).stdout.split()) > count, "the job to count on", timeout_s=120)


@pytest.fixture(params=["file", "zram"])
def swap(request: pytest.FixtureRequest) -> Iterator[str]:
    """Somewhere to swap to."""
    if request.param == "file":
        sh("dd if=/dev/zero of=/swap bs=1M count=256 status=none; chmod 600 /swap; mkswap -q /swap; swapon /swap")
        device = "/swap"
    else:
        sh("modprobe zram; echo 256M >/sys/block/zram0/disksize; mkswap -q /dev/zram0; swapon /dev/zram0")
        device = "/dev/zram0"
    yield device
    sh(f"swapoff {device}")


def test_a_job_in_swap_is_dumped_and_restored(swap: str, tmp_path: Path) -> None:
    assert command.run("run", "--name", "swapped", "--", sys.executable, "-c", _CHECKS).returncode == 0
    wait_until(lambda: "1" in command.run("logs", "swapped").stdout.split(), "the job's data", timeout_s=120)
    [found] = [each for each in command.run_json("jobs")["jobs"] if each["name"] == "swapped"]
    pid = found["pid"]
    sh(f"kill -STOP {pid}")
    group = Path(f"/proc/{pid}/cgroup").read_text().strip().rpartition(":")[2]
    # what cannot be reclaimed is an error, the rest is swapped
    sh(
        f"echo 512M swappiness=200 >/sys/fs/cgroup{group}/memory.reclaim || "
        f"echo 512M >/sys/fs/cgroup{group}/memory.reclaim || true"
    )
    swapped = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmSwap"))
    assert int(swapped.split()[1]) > 20 << 10, swapped
    sh(f"kill -CONT {pid}")
    for words in (("dump", "swapped", "--to", tmp_path / "swapped"), ("restore", tmp_path / "swapped")):
        done = command.run(*words)
        assert done.returncode == 0, done.stderr
    count = len(command.run("logs", "swapped").stdout.split())
    wait_until(lambda: len(command.run("logs", "swapped").stdout.split()) > count, "it counts on", timeout_s=120)
    command.run("kill", "swapped")
