"""The parts that make up a granted CRIU. tests/operations/test_ordinary_user.py uses one."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpucr.criu import images_pb2
from gpucr.criu.credentials import credentials_in, with_full_bounding_sets
from gpucr.criu.image_entries import encoded, head, images_in
from gpucr.criu.relocated import NotRelocatable, relocated
from gpucr.linux import capabilities

CORE = 0x55053847
PROGRAM = Path("/bin/true")


def loader_of(program: Path) -> str:
    shown = subprocess.run(["readelf", "-lW", program], capture_output=True, text=True, check=True).stdout
    return shown.partition("interpreter: ")[2].partition("]")[0]


# --- another loader ----------------------------------------------------------------------------------------------


def test_a_relocated_program_runs_with_its_own_loader_and_libraries(tmp_path: Path) -> None:
    loader = loader_of(PROGRAM)
    own_loader, copy = tmp_path / "loader", tmp_path / "program"
    own_loader.write_bytes(Path(loader).read_bytes())
    copy.write_bytes(relocated(PROGRAM.read_bytes(), str(own_loader), str(tmp_path / "lib")))
    for path in (own_loader, copy):
        path.chmod(0o755)
    assert loader_of(copy) == str(own_loader)
    (tmp_path / "lib").mkdir()
    looked = subprocess.run(
        [copy], env={"LD_DEBUG": "libs"}, capture_output=True, text=True, check=True
    )  # its exit code is the program's own
    assert f"{tmp_path}/lib" in looked.stderr
    own_loader.unlink()
    with pytest.raises(FileNotFoundError):  # what the kernel says about a loader that is missing
        subprocess.run([copy], check=False)


@pytest.mark.parametrize("size_bytes", [0, 3, 64, 200, 1000, 5000, 20000])
def test_a_truncated_program_is_refused(size_bytes: int) -> None:
    with pytest.raises(NotRelocatable):
        relocated(PROGRAM.read_bytes()[:size_bytes], "/lib/loader", "/lib")


def test_an_unsuitable_program_is_refused() -> None:
    for data in (b"#!/bin/sh\nexit 0\n" * 9, PROGRAM.read_bytes().replace(b"\x7fELF\x02", b"\x7fELF\x01", 1)):
        with pytest.raises(NotRelocatable, match="of another kind"):
            relocated(data, "/lib/loader", "/lib")


def test_damage_raises_only_the_documented_exception() -> None:
    whole = PROGRAM.read_bytes()
    for place in range(16, 64 + 13 * 56):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        try:
            changed = relocated(bytes(damaged), "/lib/loader", "/lib")
        except NotRelocatable:
            continue
        assert len(changed) > len(whole)


# --- capabilities of files ---------------------------------------------------------------------------------------


def test_capabilities_of_a_file(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives capabilities to files")
    program = tmp_path / "program"
    program.write_bytes(b"")
    assert capabilities.of_file(program) == 0
    capabilities.set_of_file(program, "CHECKPOINT_RESTORE")
    assert capabilities.names_of(capabilities.of_file(program)) == ("CAP_CHECKPOINT_RESTORE",)
    inherited_only = struct.pack("<5I", 0x02000000, 0, 0, 1 << 8, 0)  # not effective
    os.setxattr(program, "security.capability", inherited_only)
    assert capabilities.of_file(program) == 0


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that every user can reach. The one of all tests stays closed: others rely on that."""
    with tempfile.TemporaryDirectory(prefix="gpucr-granted-") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


def test_a_relocated_program_gets_only_the_granted_capability(reachable: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives capabilities to files")
    cat = reachable / "cat"
    cat.write_bytes(Path("/bin/cat").read_bytes())
    cat.chmod(0o755)
    capabilities.set_of_file(cat, "CHECKPOINT_RESTORE")
    shown = subprocess.run(
        [cat, "/proc/self/status"], user=4001, group=4001, extra_groups=[], capture_output=True, text=True, check=True
    ).stdout
    assert f"CapEff:\t{capabilities.mask('CHECKPOINT_RESTORE'):016x}" in shown


# --- bounding sets in images --------------------------------------------------------------------------------------


def core(*, uid: int, bounding: list[int]) -> bytes:
    creds = images_pb2.Credentials(uid=uid, cap_bnd=bounding)
    return head(CORE) + encoded(images_pb2.Core(thread_core=images_pb2.Thread(creds=creds)))


def test_bounding_sets_are_filled_and_the_rest_is_unchanged(tmp_path: Path) -> None:
    unknown = b"\x98\x06\x05"  # field 99, a number: one that gpucr does not know
    plain = core(uid=4001, bounding=[0xFEFFFFFF, 0x1FF])
    body = plain[12:] + unknown
    (tmp_path / "core-7.img").write_bytes(plain[:8] + struct.pack("<I", len(body)) + body)
    (tmp_path / "core-8.img").write_bytes(core(uid=4002, bounding=[]))
    (tmp_path / "files.img").write_bytes(b"not looked at")
    names = os.listdir(tmp_path)
    assert credentials_in(names, images_in(tmp_path))[1] == {4001, 4002}
    changed = with_full_bounding_sets(names, images_in(tmp_path))
    assert set(changed) == {"core-7.img", "core-8.img"}
    assert changed["core-7.img"].endswith(unknown)
    for name, data in changed.items():
        (tmp_path / name).write_bytes(data)
    assert credentials_in(names, images_in(tmp_path))[1] == {4001, 4002}
    found = images_pb2.Core.FromString(changed["core-8.img"][12:]).thread_core.creds.cap_bnd
    assert list(found) == [0xFFFFFFFF, 0xFFFFFFFF]


def test_python_can_be_relocated(tmp_path: Path) -> None:
    """A large program, built differently from the system's."""
    python = Path(sys.executable).resolve()
    copy = tmp_path / "python"
    copy.write_bytes(relocated(python.read_bytes(), loader_of(python), str(tmp_path)))
    copy.chmod(0o755)
    environment = {"PYTHONHOME": sys.base_prefix, "LD_LIBRARY_PATH": f"{sys.base_prefix}/lib"}
    done = subprocess.run([copy, "-c", "print(6 * 7)"], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "42\n"
