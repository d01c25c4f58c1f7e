"""Defects planted in a snapshot's images, with digests that fit: a rehearsal finds each of them."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from msgspec import structs

import gpucr
from gpucr.criu import images_pb2
from gpucr.errors import RehearsalFailed, SnapshotDamaged
from gpucr.snapshot import files, manifest
from gpucr.snapshot.folder import MANIFEST_NAME
from tests.counter import wait_until
from tests.stepping import Job

pytestmark = [pytest.mark.criu, pytest.mark.root]

PROGRAM = """
import os, signal, socket, threading
kept = open("kept", "w+")
kept.write("x" * 5000)
kept.flush()
gone = open("gone", "w+")
gone.write("gone")
gone.flush()
os.unlink("gone")
pipe = os.pipe()
os.write(pipe[1], b"in the pipe")
pair = socket.socketpair()
threading.Thread(target=threading.Event().wait, daemon=True).start()
child = os.fork()
if child == 0:
    signal.pause()
done()
step()
done()
os.kill(child, signal.SIGKILL)
"""

_LENGTH = struct.Struct("=I")
_HEAD_BYTES = 8


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Path]]:
    """A job that runs, and a snapshot of it."""
    base = tmp_path_factory.mktemp("defects")
    job = Job(base / "job", PROGRAM)
    gpucr.dump(job.pid, base / "s", leave_running=True)
    yield job, base / "s"
    job.kill()


class Images:
    """The images of a snapshot, to be damaged."""

    def __init__(self, snapshot: Path, root_pid: int, child_pid: int) -> None:
        self.snapshot = snapshot
        self.folder = snapshot / "images"
        self.root_pid = root_pid
        self.child_pid = child_pid

    def edit(self, name: str, kind: type[Message], change: Callable[[Any], object], *, first: int = 0) -> None:
        """Change entries of an image, from this one on, until ``change`` returns something true."""
        data = (self.folder / name).read_bytes()
        out, data, number, is_done = data[:_HEAD_BYTES], data[_HEAD_BYTES:], 0, False
        while data:
            (length,) = _LENGTH.unpack_from(data)
            entry, data = data[_LENGTH.size : _LENGTH.size + length], data[_LENGTH.size + length :]
            if number >= first and not is_done:
                parsed = kind.FromString(entry)
                is_done = bool(change(parsed))
                entry = parsed.SerializeToString()
            out += _LENGTH.pack(len(entry)) + entry
            number += 1
        assert is_done, f"there is no such entry in {name}"
        self.replace(name, out)

    def replace(self, name: str, data: bytes) -> None:
        (self.folder / name).unlink()
        (self.folder / name).write_bytes(data)
        (self.folder / name).chmod(0o600)

    def find(self, pattern: str) -> Path:
        return sorted(self.folder.glob(pattern))[0]

    def seal(self) -> None:
        """Let the manifest have the digests of what is there now."""
        path = self.snapshot / MANIFEST_NAME
        known = manifest.decode(path.read_bytes())
        there = [each.path for each in known.files if (self.snapshot / each.path).exists()]
        path.write_bytes(manifest.encode(structs.replace(known, files=files.record(self.snapshot, there))))


def of_file(name: bytes, change: Callable[[Any], object]) -> Callable[[Images], None]:
    def on(entry: Any) -> bool:
        if not (entry.HasField("reg") and entry.reg.name.endswith(name)):
            return False
        change(entry.reg)
        return True

    return lambda images: images.edit("files.img", images_pb2.FileEntry, on)


def set_to(member: str, value: object) -> Callable[[Any], bool]:
    def change(entry: Any) -> bool:
        setattr(entry, member, value)
        return True

    return change


def a_descriptor_of_nothing(images: Images) -> None:
    images.edit(images.find("fdinfo-*.img").name, images_pb2.Descriptor, set_to("id", 99999))


def a_table_of_descriptors_that_is_missing(images: Images) -> None:
    images.edit(f"ids-{images.child_pid}.img", images_pb2.KernelObjects, set_to("files_id", 99))


def a_mapping_of_nothing(images: Images) -> None:
    def change(entry: Any) -> bool:
        vma = next(each for each in entry.vmas if each.status & 1 << 6)  # VMA_FILE_PRIVATE
        vma.shmid = 99999
        return True

    images.edit(f"mm-{images.root_pid}.img", images_pb2.AddressSpace, change)


def a_mapping_that_is_missing(images: Images) -> None:
    """Pages that belong into none."""

    def change(entry: Any) -> bool:
        del entry.vmas[: len(entry.vmas) // 2]
        return True

    images.edit(f"mm-{images.root_pid}.img", images_pb2.AddressSpace, change)


def a_process_without_its_state(images: Images) -> None:
    (images.folder / f"core-{images.child_pid}.img").unlink()


def a_thread_without_its_state(images: Images) -> None:
    def change(entry: Any) -> bool:
        entry.threads.append(32000)
        return True

    images.edit("pstree.img", images_pb2.TreeEntry, change)


def a_process_of_no_parent(images: Images) -> None:
    images.edit("pstree.img", images_pb2.TreeEntry, set_to("ppid", 31999), first=1)


def a_process_that_is_missing(images: Images) -> None:
    data = (images.folder / "pstree.img").read_bytes()
    (length,) = _LENGTH.unpack_from(data, _HEAD_BYTES)
    images.replace("pstree.img", data[: _HEAD_BYTES + _LENGTH.size + length])


def another_name(images: Images) -> None:
    def change(entry: Any) -> bool:
        entry.tc.comm = b"other"
        return True

    images.edit(f"core-{images.child_pid}.img", images_pb2.Core, change)


def more_pages_than_there_are(images: Images) -> None:
    def change(entry: Any) -> bool:
        entry.compat_nr_pages = entry.nr_pages = 1 << 20
        return True

    images.edit(f"pagemap-{images.root_pid}.img", images_pb2.PagemapEntry, change, first=1)


def a_deleted_file_without_content(images: Images) -> None:
    images.find("ghost-file-*.img").unlink()


def a_list_of_processes_that_is_cut_off(images: Images) -> None:
    images.replace("pstree.img", (images.folder / "pstree.img").read_bytes()[:-3])


DEFECTS: dict[str, Callable[[Images], None]] = {
    "a file of another name": of_file(b"/kept", lambda reg: setattr(reg, "name", reg.name + b"-not")),
    "a file of another mode": of_file(b"/kept", lambda reg: setattr(reg, "mode", reg.mode ^ 0o111)),
    "a library of another size": of_file(b"/libc.so.6", lambda reg: setattr(reg, "size", reg.size + 1)),
    **{
        each.__name__.replace("_", " "): each
        for each in (
            a_descriptor_of_nothing,
            a_table_of_descriptors_that_is_missing,
            a_mapping_of_nothing,
            a_mapping_that_is_missing,
            a_process_without_its_state,
            a_thread_without_its_state,
            a_process_of_no_parent,
            a_process_that_is_missing,
            another_name,
            more_pages_than_there_are,
            a_deleted_file_without_content,
            a_list_of_processes_that_is_cut_off,
        )
    },
}


@pytest.mark.parametrize("defect", list(DEFECTS))
def test_a_planted_defect(
    defect: str, sound: tuple[Job, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    job, snapshot = sound
    shutil.copytree(snapshot, tmp_path / "s")
    (tmp_path / "s").chmod(0o700)
    child = next(pid for pid in job.pids() if pid != job.pid)
    images = Images(tmp_path / "s", job.pid, child)
    DEFECTS[defect](images)
    images.seal()
    with pytest.raises((RehearsalFailed, SnapshotDamaged)):
        gpucr.rehearse(tmp_path / "s", timeout_s=30)
    wait_until(lambda: len(os.listdir(f"/proc/{job.pid}/task")) == 2, "the job to run as before")
    assert set(job.pids()) == {job.pid, child}


def test_the_sound_one(sound: tuple[Job, Path], tmp_path: Path) -> None:
    """Without a defect the same copy, with the same manifest written again, is fine."""
    shutil.copytree(sound[1], tmp_path / "s")
    (tmp_path / "s").chmod(0o700)
    Images(tmp_path / "s", 0, 0).seal()
    assert gpucr.rehearse(tmp_path / "s").processes == 2
