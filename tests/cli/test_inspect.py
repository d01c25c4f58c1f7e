"""`gpucr inspect` on snapshots that are made here, without a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from gpucr.cli.inspect import command
from gpucr.cli.snapshot_tree import Branch, tree_of
from gpucr.criu.contents import SharedMemory
from gpucr.criu.imaged_files import OpenDescriptor
from gpucr.linux.held_folder import HeldFolder
from gpucr.model import Extent
from gpucr.operations.inspect import ProcessContents, SnapshotContents
from gpucr.snapshot.folder import Snapshot, UnfinishedSnapshot
from gpucr.snapshot.manifest import ProcessRecord
from tests.command import parsed
from tests.snapshot import samples

PIECE_BYTES = 8192
DEVICE_MEMORY = os.urandom(PIECE_BYTES) + bytes(2 * PIECE_BYTES) + os.urandom(4096)
"""Four pieces: the second and the third are zero, the last one is short."""


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def committed(folder: Path, first: ProcessRecord) -> Snapshot:
    unfinished = UnfinishedSnapshot(folder)
    unfinished.create()
    (unfinished.images / "core-1.img").write_bytes(b"registers")
    manifest = samples.manifest()
    return unfinished.commit(replace(manifest, processes=(first, *manifest.processes[1:])))


@pytest.fixture
def with_device_data(tmp_path: Path) -> Snapshot:
    return samples.committed_with_device_data(tmp_path / "snap", DEVICE_MEMORY, piece_bytes=PIECE_BYTES)


def test_stored_and_zero_bytes_of_device_memory(with_device_data: Snapshot) -> None:
    found = parsed(inspect(with_device_data.path, "--json").stdout)
    assert found["device_memory"] == [
        {
            "pid": 100,
            "kind": "captured",
            "place": "device",
            "size_bytes": 28672,
            "stored_bytes": 12288,
            "zero_bytes": 16384,
            "extents": 1,
        }
    ]
    assert found["size_bytes"] == 12288 + sum(map(len, samples.IMAGES.values()))
    lines = inspect(with_device_data.path).stdout.splitlines()
    assert "size        17.9 KiB: 5.9 KiB in 3 images of CRIU, 12.0 KiB of device memory beside them" in lines
    place = lines.index("job: 2 processes, 3 threads")
    assert [line[:40] for line in lines[place + 1 :]] == [
        "├─ memory of all",
        "│  └─ device memory: 28.0 KiB in 1 exten",
        "└─ 100 (checkpointed, 4.0 GiB on GPUs, 2",
        "   ├─ device memory: 28.0 KiB in 1 exten",
        "   └─ 102 (no CUDA, 1 thread) loader",
    ]
    assert lines[-2] == "   ├─ device memory: 28.0 KiB in 1 extent, 12.0 KiB stored in device/"
    assert "overruled   process 100 shares GPU memory (P2P): it would be lost" in lines
    assert found["manifest"]["overruled"] == [
        {"finding": "process 100 shares GPU memory (P2P)", "consequence": "it would be lost"}
    ]


def test_device_memory_in_the_images(tmp_path: Path) -> None:
    first = replace(
        samples.manifest().processes[0], staging=(Extent(0x7F0000000000, 3 << 20), Extent(0x7F1000000000, 1 << 20))
    )
    snapshot = committed(tmp_path / "snap", first)
    shown = inspect(snapshot.path).stdout
    assert "size        9 B: 9 B in 1 image of CRIU\n" in shown
    assert "   ├─ device memory: 4.0 MiB in 2 extents, in CRIU's images\n" in shown
    (found,) = parsed(inspect(snapshot.path, "--json").stdout)["device_memory"]
    assert found == {
        "pid": 100,
        "kind": "plain",
        "place": "images",
        "size_bytes": 4 << 20,
        "stored_bytes": None,
        "zero_bytes": None,
        "extents": 2,
    }


def test_device_memory_in_the_images_without_known_extents(tmp_path: Path) -> None:
    """A process that was suspended before the dump, in memory that is not gpucr's."""
    snapshot = committed(tmp_path / "snap", replace(samples.manifest().processes[0], staging=()))
    assert "   ├─ device memory: in CRIU's images\n" in inspect(snapshot.path).stdout
    (found,) = parsed(inspect(snapshot.path, "--json").stdout)["device_memory"]
    assert (found["size_bytes"], found["extents"]) == (None, 0)


def test_verify_reads_device_memory_too(with_device_data: Snapshot) -> None:
    assert "verified    yes" in inspect(with_device_data.path, "--verify").stdout
    with (with_device_data.device / "100.0").open("r+b") as stream:
        stream.write(bytes(4))
    assert "verified    manifest only" in inspect(with_device_data.path).stdout
    damaged = inspect(with_device_data.path, "--verify")
    assert damaged.stdout == ""
    assert "device/100.0, which holds device memory of process 100, differs" in str(damaged.exception)


def test_unreadable_images_are_reported(with_device_data: Snapshot) -> None:
    shown = inspect(with_device_data.path)
    assert shown.exit_code == 0
    assert shown.stderr == "warning: CRIU's image pstree.img: it is missing\n"
    found = parsed(inspect(with_device_data.path, "--json").stdout)["contents"]
    assert found["problems"] == ["pstree.img: it is missing"]
    assert [process["pid"] for process in found["processes"]] == [100, 102]
    device = {"kind": "device", "mappings": 1, "mapped_bytes": 28672, "stored_bytes": 12288, "packed_bytes": None}
    assert found["processes"][0]["memory"] == [device]
    assert found["memory"] == [device]
    assert found["packed_bytes"] is None


def test_other_users_names_cannot_control_the_terminal() -> None:
    record = samples.manifest().processes[0]
    descriptors = (OpenDescriptor(3, "file", "/x\x1b[2J"), OpenDescriptor(4, "unix", None))
    contents = SnapshotContents(
        Snapshot(Path("/s"), samples.manifest(), HeldFolder.open("/")),
        (ProcessContents(replace(record, command_line=("a\x07",)), (), descriptors),),
        (SharedMemory(5, "\x1b]0;", 4096, 4096, (100,)),),
        (),
    )
    lines = list(tree_of(contents, every_file=True).lines())
    assert all(line.isprintable() for line in lines)
    assert lines[-6:] == [
        "│  ├─ open files: 1 file",
        "│  │  └─ 3 file /x\\x1b[2J",
        "│  └─ sockets: 1 unix",
        "│     └─ 4 unix",
        "└─ shared memory: 1 object, 4.0 KiB stored once",
        "   └─ \\x1b]0;: 4.0 KiB, 4.0 KiB stored, mapped by 100",
    ]


def test_a_process_chain_of_any_length() -> None:
    root = deepest = Branch("0")
    for number in range(1, 5000):
        deepest.branches.append(deepest := Branch(str(number)))
    lines = list(root.lines())
    assert len(lines) == 5000
    assert lines[-1] == "   " * 4998 + "└─ 4999"
