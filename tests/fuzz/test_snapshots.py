"""What a snapshot is made of, as somebody else may have changed it: its manifest, and CRIU's images."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucr.criu import images, images_pb2
from gpucr.criu.contents import read_contents
from gpucr.criu.image_entries import ImageError, images_in
from gpucr.criu.linked_files import read_remaps
from gpucr.criu.page_images import PageMap, cuts
from gpucr.criu.pids import pids_in
from gpucr.linux.sock_diag import outside_connections
from gpucr.records import RecordError
from gpucr.snapshot import manifest as manifests
from tests.criu.test_image_contents import READ_WRITE, image, job, mapping, run
from tests.fuzz.damage import Json, damaged_bytes, damaged_json, written
from tests.snapshot.samples import DEVICE_DATA, manifest

SOUND = manifests.encode(manifest(device_data=DEVICE_DATA))
BODY: Json = json.loads(SOUND)["manifest"]
IMAGES = job([mapping(16, 4, 1 << 9, prot=READ_WRITE)], [run(16, 2)])


def decode(data: bytes) -> None:
    with contextlib.suppress(RecordError):
        manifests.decode_brief(data)
    with contextlib.suppress(RecordError):
        found = manifests.decode(data)
        assert manifests.decode(manifests.encode(found)).root_pid == found.root_pid
        assert found.size_bytes >= 0
        brief = manifests.decode_brief(data)
        assert brief.command_line in (
            *(each.command_line for each in found.processes),
            *([found.launch.command] if found.launch is not None else []),
        )


@given(damaged_bytes([SOUND]))
def test_damaged_manifests(data: bytes) -> None:
    decode(data)


@given(damaged_json(BODY))
def test_forged_manifests(body: Json) -> None:
    """With a digest that fits."""
    canonical = written(body, sort_keys=True, separators=(",", ":"))
    decode(written({"sha256": hashlib.sha256(canonical).hexdigest(), "manifest": body}))


@given(st.data())
def test_damaged_images(data: st.DataObject) -> None:
    changed = dict(IMAGES)
    name = data.draw(st.sampled_from(sorted(changed)))
    changed[name] = data.draw(damaged_bytes([changed[name], changed["files.img"]]))
    read_all(changed)


def read_all(changed: dict[str, bytes]) -> None:
    def open_image(name: str) -> BinaryIO:
        if name not in changed:
            raise FileNotFoundError(2, "No such file or directory", name)
        return io.BytesIO(changed[name])

    contents = read_contents(open_image, {})
    assert all(use.mapped_bytes >= 0 for process in contents.processes for use in process.memory)
    with contextlib.suppress(ImageError, OSError):
        assert all(pid > 0 for pid in pids_in(open_image))
    with contextlib.suppress(ImageError):
        files = images.FilesImage.parse(changed["files.img"])
        files.close_connections(outside_connections(files.tcp_sockets()))
        files.adapt_to_sizes({"/log": (0, 1)})
        files.move({"10.0.0.1": "10.0.0.2", "127.0.0.1": "127.0.0.2", "::1": "fd00::2"})
        assert images.FilesImage.parse(files.encode()).paths() == files.paths()
    with contextlib.suppress(ImageError):
        assert PageMap.read(open_image("pagemap-7.img")).size_bytes >= 0


def test_a_named_pipe_in_its_own_file() -> None:
    entry = images_pb2.FileEntry(type=1, id=1)
    entry.fifo.pipe_id = 1
    entry.fifo.regf_id = 1
    read_all({**IMAGES, "files.img": image(images.MAGIC, entry)})


@pytest.mark.parametrize("name", ["files.img", "remap-fpath.img", "pagemap-7.img"])
def test_a_named_pipe_instead_of_an_image_is_refused_at_once(name: str, tmp_path: Path) -> None:
    for image_name, data in IMAGES.items():
        if image_name != name:
            (tmp_path / image_name).write_bytes(data)
    os.mkfifo(tmp_path / name)
    readers: dict[str, Any] = {
        "files.img": images.FilesImage.read,
        "remap-fpath.img": lambda folder: read_remaps(images_in(folder)),
    }
    with pytest.raises(OSError, match="not a plain file"):
        readers.get(name, lambda folder: cuts(folder, 4096))(tmp_path)
