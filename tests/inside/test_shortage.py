"""No room on a disk, no inodes, no pids, no memory: each command fails with what is missing, and the job runs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import command
from tests.inside.conftest import is_running, sh

_MIB = 1 << 20
_SMALLEST_MIB = {"ext4": 16, "xfs": 300, "btrfs": 120}


@pytest.fixture(params=sorted(_SMALLEST_MIB))
def full(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system without room."""
    image, place = tmp_path / "image", tmp_path / "full"
    place.mkdir()
    kind = request.param
    sh(
        f"truncate --size {_SMALLEST_MIB[kind]}M {image}; mkfs.{kind} -q {image}; mount -o loop {image} {place}; "
        f"mkdir {place}/state; dd if=/dev/zero of={place}/filler bs=64K 2>/dev/null || true; sync"
    )
    yield place
    sh(f"umount {place}")


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
