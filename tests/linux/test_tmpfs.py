"""gpucr.linux.tmpfs: files on huge pages, their memory, and what happens if there is none."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.linux import memory, tmpfs
from gpucr.linux.memory import HUGE_PAGE_BYTES
from gpucr.linux.tmpfs import FILE_NAME, StagingFile
from tests.children import NOBODY_UID, python
from tests.conftest import skip_or_fail
from tests.memory_cgroup import ENTER, limited

MIB = 1 << 20


@pytest.fixture
def file() -> Iterator[StagingFile]:
    """A file of 16 MiB."""
    with StagingFile.create(16 * MIB) as made:
        yield made


@pytest.fixture
def huge_file(file: StagingFile) -> StagingFile:
    """The same, where the machine has huge pages for it."""
    if file.reason is not None:
        pytest.skip(file.reason)
    return file


@pytest.fixture(params=["huge", "small"])
def any_file(request: pytest.FixtureRequest) -> Iterator[StagingFile]:
    """A file of 16 MiB on huge pages (if there are some) and one on small pages."""
    if request.param == "huge":
        yield request.getfixturevalue("huge_file")
        return
    with StagingFile.adopt(os.memfd_create("small")) as made:
        made.resize(16 * MIB)
        yield made


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program of its own: one that may end by a signal."""
    code = "from gpucr.linux.tmpfs import StagingFile; import os, re, resource, sys\n" + code
    arguments_text = [str(argument) for argument in arguments]
    return subprocess.run(
        [sys.executable, "-c", code, *arguments_text], capture_output=True, text=True, check=False, timeout=60
    )


# --- the file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "size"), [(0, 0), (1, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 1, 4 * MIB)])
def test_a_new_file_has_room_but_takes_no_memory(asked: int, size: int) -> None:
    with StagingFile.create(asked) as file:
        assert file.size_bytes == os.fstat(file.fd).st_size == size
        assert file.resident_bytes() == 0
        assert file.has_huge_pages is (file.reason is None)
        assert not os.get_inheritable(file.fd)
        assert os.fstat(file.fd).st_nlink == 0


def test_room_for_more_than_the_machine_has() -> None:
    with StagingFile.create(64 << 40) as file:
        assert file.size_bytes == 64 << 40


def test_root_gets_huge_pages() -> None:
    policy = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if os.geteuid() != 0:
        skip_or_fail("root", "only root mounts a tmpfs")
    if not policy.exists() or "[deny]" in policy.read_text():
        pytest.skip("this kernel gives shared memory no huge pages")
    with StagingFile.create(2 * MIB) as file:
        assert file.reason is None


def test_populated_memory_uses_huge_pages(huge_file: StagingFile) -> None:
    huge_file.populate(0, huge_file.size_bytes)
    with mmap.mmap(huge_file.fd, huge_file.size_bytes) as mapped:
        area = ctypes.c_char.from_buffer(mapped)
        address = ctypes.addressof(area)
        del area
        for offset in range(0, len(mapped), HUGE_PAGE_BYTES):
            mapped[offset] = 1  # one byte in each: only a huge page brings the rest
        assert smaps_bytes(address, "ShmemPmdMapped") == huge_file.size_bytes


def smaps_bytes(address: int, field: str) -> int:
    """A field of the mapping that begins at this address (proc_pid_smaps(5))."""
    _, _, after = Path("/proc/self/smaps").read_text().partition(f"\n{address:x}-")
    (line,) = [line for line in after.split("VmFlags")[0].splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def test_without_privileges_pages_are_small_and_the_reason_is_reported() -> None:
    if os.geteuid() != 0:
        skip_or_fail("root", "only root has privileges to drop")
    code = (
        f"os.setuid({NOBODY_UID}); f = StagingFile.create(4 << 20); f.populate(0, 4 << 20)\n"
        "print(f.has_huge_pages, f.resident_bytes(), f.reason)"
    )
    done = run(code)
    policy = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    if "[always]" in policy or "[force]" in policy or "[within_size]" in policy:
        assert done.stdout.split() == ["True", str(4 * MIB), "None"], done.stderr
    else:
        assert done.stdout.startswith(f"False {4 * MIB} no tmpfs with huge pages can be made"), done.stderr
        assert "Operation not permitted" in done.stdout


@pytest.mark.parametrize("kind", ["as made", "memfd"])
def test_the_memory_survives_in_another_process(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "memfd":
        monkeypatch.setattr(tmpfs, "_FSOPEN", 9999)  # a call that no kernel has: ENOSYS
    file = StagingFile.create(4 * MIB)
    os.pwrite(file.fd, b"state", 3 * MIB)
    code = (
        "import mmap, os, signal, sys; f = os.open(sys.argv[1], os.O_RDWR); m = mmap.mmap(f, 4 << 20); os.close(f)\n"
        "print(m[3 << 20:(3 << 20) + 5].decode(), flush=True); signal.pause()"
    )
    with python(code, f"/proc/{os.getpid()}/fd/{file.fd}") as child:
        assert child.words == ("state",)
        file.close()
        (mapping,) = [m for m in memory.read_maps(child.pid) if m.path.startswith(f"/{FILE_NAME}")]
        assert (mapping.permissions, mapping.end - mapping.start, mapping.offset) == ("rw-s", 4 * MIB, 0)
        again = os.open(f"/proc/{child.pid}/map_files/{mapping.start:x}-{mapping.end:x}", os.O_RDWR)
        with StagingFile.adopt(again) as adopted:
            assert adopted.size_bytes == 4 * MIB
            assert adopted.has_huge_pages is file.has_huge_pages
            assert os.pread(adopted.fd, 5, 3 * MIB) == b"state"


def test_closing_twice_closes_nothing_else() -> None:
    file = StagingFile.create(1)
    number = file.fd
    file.close()
    another = os.open("/dev/null", os.O_RDONLY)
    try:
        if another != number:
            os.dup2(another, number)  # somebody else has the number now
        file.close()
        os.fstat(number)
    finally:
        os.close(another)
        if another != number:
            os.close(number)


# --- its memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_populate_allocates_zeros_and_keeps_contents(any_file: StagingFile, threads: int | None) -> None:
    os.pwrite(any_file.fd, b"kept", 5 * MIB)
    any_file.populate(0, any_file.size_bytes, threads)
    assert any_file.resident_bytes() == any_file.size_bytes
    assert os.pread(any_file.fd, any_file.size_bytes, 0) == bytes(5 * MIB) + b"kept" + bytes(11 * MIB - 4)


def test_populate_part_of_the_file(any_file: StagingFile) -> None:
    any_file.populate(6 * MIB, 4 * MIB)
    assert any_file.resident_bytes() == 4 * MIB
    assert os.lseek(any_file.fd, 0, os.SEEK_DATA) == 6 * MIB
    any_file.populate(14 * MIB, 1 << 40)  # to the end, and no further
    assert any_file.resident_bytes() == 6 * MIB
    any_file.populate(16 * MIB, MIB)
    assert any_file.resident_bytes() == 6 * MIB
    assert any_file.size_bytes == os.fstat(any_file.fd).st_size == 16 * MIB


def test_populate_on_a_kernel_without_madv_populate(any_file: StagingFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tmpfs, "_MADV_POPULATE_WRITE", 9999)
    any_file.populate(4 * MIB, 6 * MIB, 2)
    assert any_file.resident_bytes() == 6 * MIB


def test_populating_does_not_use_our_own_memory() -> None:
    code = (
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) << 10\n"
        "f = StagingFile.create(192 << 20); f.populate(0, 8 << 20, 4); before = peak()\n"
        "f.populate(0, 192 << 20, 4); print(f.resident_bytes(), peak() - before)"
    )
    resident, grown = map(int, run(code).stdout.split())
    assert resident == 192 * MIB
    assert grown < 64 * MIB


def test_resizing(any_file: StagingFile) -> None:
    any_file.populate(0, any_file.size_bytes)
    any_file.resize(6 * MIB)
    assert (any_file.size_bytes, any_file.resident_bytes()) == (6 * MIB, 6 * MIB)
    any_file.resize(32 * MIB)
    assert (any_file.size_bytes, any_file.resident_bytes()) == (32 * MIB, 6 * MIB)
    assert os.fstat(any_file.fd).st_size == 32 * MIB


# --- no memory -------------------------------------------------------------------------------------------------


def test_too_little_memory_is_refused_before_anything_is_allocated(
    any_file: StagingFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 16 * MIB - 1)
    with pytest.raises(OSError, match="of host memory are missing") as caught:
        any_file.populate(0, any_file.size_bytes)
    assert caught.value.errno == errno.ENOMEM
    assert any_file.resident_bytes() == 0
    any_file.populate(0, 2 * MIB)
    any_file.populate(0, any_file.size_bytes)  # what is there needs no memory any more
    assert any_file.resident_bytes() == any_file.size_bytes


def test_a_cgroup_at_its_limit_is_an_error_and_no_kill() -> None:
    code = (
        "f = StagingFile.create(256 << 20)\n"
        "try: f.populate(0, 256 << 20)\n"
        "except OSError as e: print(e.errno, f.resident_bytes())"
    )
    with limited(96 * MIB) as (folder, _):
        done = run(ENTER.format(folder=str(folder)) + code)
    assert (done.returncode, done.stdout) == (0, f"{errno.ENOMEM} 0\n"), done.stderr


@pytest.mark.parametrize("advice", [tmpfs._MADV_POPULATE_WRITE, 9999])
def test_a_full_file_system_is_an_error_and_no_signal(tmp_path: Path, advice: int) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", tmp_path], check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    code = (
        "import gpucr.linux.tmpfs as t; t._MADV_POPULATE_WRITE = int(sys.argv[2])\n"
        "f = StagingFile.adopt(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)); f.resize(64 << 20)\n"
        "try: f.populate(0, 64 << 20, 2)\n"
        "except OSError as e: print(e.errno)"
    )
    try:
        done = run(code, tmp_path / "file", advice)
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert (done.returncode, done.stdout) == (0, f"{errno.ENOSPC}\n"), done.stderr


def test_a_file_size_limit_is_an_error_and_leaves_no_descriptor() -> None:
    code = (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); before = os.listdir('/proc/self/fd')\n"
        "try: StagingFile.create(4 << 20)\n"
        "except OSError as e: print(e.errno, os.listdir('/proc/self/fd') == before)"
    )
    assert run(code).stdout == f"{errno.EFBIG} True\n"
