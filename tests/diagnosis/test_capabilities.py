"""A restore with fewer capabilities than the job had is refused: CRIU would fail, or hang if there are threads."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpucr
from gpucr.criu import images_pb2
from gpucr.criu.credentials import credentials_in
from gpucr.criu.image_entries import ImageError, images_in
from gpucr.diagnosis.preflight import check_capabilities
from gpucr.linux import capabilities, processes
from tests.children import Child, python

THREADED = (
    "import signal, threading\n"
    "for _ in range(2): threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    "print('ready', flush=True); signal.pause()"
)
WITHOUT_SYS_BOOT = (
    "import ctypes, os, sys\nassert ctypes.CDLL(None).prctl(24, 22, 0, 0, 0) == 0\n"  # PR_CAPBSET_DROP, CAP_SYS_BOOT
    "os.execv(sys.executable, [sys.executable, '-m', 'gpucr', *sys.argv[1:]])"
)
SYS_BOOT = 1 << 22
MAGIC = bytes.fromhex("1943565447380555")


def wanted_by(images: Path) -> int:
    return credentials_in([path.name for path in images.iterdir()], images_in(images))[0]


@pytest.fixture
def threaded() -> Iterator[Child]:
    with python(THREADED) as child:
        yield child


@pytest.mark.criu
@pytest.mark.skipif(not capabilities.own().bounding & SYS_BOOT, reason="CAP_SYS_BOOT is missing from the beginning")
@pytest.mark.parametrize("place", ["snapshot", "store#a"])
def test_a_threaded_job_is_not_restored_without_its_capabilities(threaded: Child, tmp_path: Path, place: str) -> None:
    if "#" in place:
        gpucr.init_store(tmp_path / "store")
    snapshot = f"{tmp_path}/{place}"
    gpucr.dump(threaded.pid, snapshot, force=True)  # its output goes to this test
    threaded.reap()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SYS_BOOT, "restore", str(snapshot)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "CAP_SYS_BOOT" in done.stderr
    assert "code:  GPUCR-CAPABILITIES" in done.stderr
    assert processes.read_stat(threaded.pid) is None
    report = gpucr.restore(snapshot)
    processes.kill_tree(report.pid, including_root=True)
    assert report.pid == threaded.pid


@pytest.mark.criu
def test_a_jobs_capabilities_are_read_from_its_images(threaded: Child, tmp_path: Path) -> None:
    gpucr.dump(threaded.pid, tmp_path / "snapshot", force=True)
    threaded.reap()
    assert wanted_by(tmp_path / "snapshot" / "images") == capabilities.own().permitted


@pytest.mark.criu
def test_capabilities_the_job_lacked_are_not_required(tmp_path: Path) -> None:
    """Capabilities the job lacked are not required, however few the restoring process has."""
    drop = "import ctypes; assert ctypes.CDLL(None).prctl(24, 22, 0, 0, 0) == 0\n"
    again = f"import os, sys\nos.execv(sys.executable, [sys.executable, '-I', '-S', '-c', {THREADED!r}])"
    snapshot = tmp_path / "snapshot"
    with python(drop + again) as child:
        gpucr.dump(child.pid, snapshot, force=True)
        child.reap()
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_SYS_BOOT, "restore", str(snapshot), "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        processes.kill_tree(child.pid, including_root=True)
        assert done.returncode == 0, done.stderr
        assert not wanted_by(snapshot / "images") & SYS_BOOT


# --- the check and what it reads --------------------------------------------------------------------------------


def test_extra_capabilities_are_no_obstacle() -> None:
    assert check_capabilities(0b0101, 0b1101) == []


def test_missing_capabilities_are_named() -> None:
    (finding,) = check_capabilities(1 << 21 | 1 << 22, 1 << 21)
    assert (finding.severity, finding.code) == ("blocking", "GPUCR-CAPABILITIES")
    assert "CAP_SYS_BOOT" in finding.evidence
    assert "CAP_SYS_ADMIN" not in finding.evidence


def write_core(folder: Path, pid: int, permitted: list[int], inheritable: list[int]) -> None:
    core = images_pb2.Core()
    core.thread_core.creds.cap_prm.extend(permitted)
    core.thread_core.creds.cap_inh.extend(inheritable)
    body = core.SerializeToString()
    (folder / f"core-{pid}.img").write_bytes(MAGIC + struct.pack("<I", len(body)) + body)


def test_the_sets_of_all_threads_count(tmp_path: Path) -> None:
    write_core(tmp_path, 7, [1, 0], [0, 0])
    write_core(tmp_path, 8, [0, 2], [4, 0])
    assert wanted_by(tmp_path) == 1 | 2 << 32 | 4


@pytest.mark.parametrize("data", [b"", MAGIC, MAGIC + b"\xff\xff\xff\xff", b"\0" * 64])
def test_a_damaged_image(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "core-7.img").write_bytes(data)
    with pytest.raises(ImageError):
        wanted_by(tmp_path)


def test_a_set_with_unknown_bits(tmp_path: Path) -> None:
    write_core(tmp_path, 7, [1, 2, 3], [])
    with pytest.raises(ImageError, match="more than 64 bits"):
        wanted_by(tmp_path)
