"""The files of a snapshot's device memory, as somebody else may have changed them: all of it comes back, or none."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpucr.errors import SnapshotError
from gpucr.gpu_state.source import FileDestination
from gpucr.model import DevicePart
from gpucr.records import RecordError
from gpucr.snapshot.device import DeviceReader, FolderPieces, check_shape, verify
from gpucr.snapshot.device.stripes import Layout, Stripes
from gpucr.snapshot.manifest import DeviceData
from tests.fuzz.damage import EXAMPLES

_PAGE = 4096
_PIECE = 2 * _PAGE
_PART = DevicePart(42)
_MEMORY = b"".join(
    bytes(_PIECE) if number % 3 == 1 else bytes([number + 1]) * _PIECE for number in range(11)
)[:-_PAGE]  # fmt: skip
_DIGESTS = tuple(
    hashlib.sha256(piece).hexdigest() if any(piece) else None
    for piece in (_MEMORY[start : start + _PIECE] for start in range(0, len(_MEMORY), _PIECE))
)
_DATA = DeviceData((), len(_MEMORY), _PIECE, 4, _DIGESTS)
_LIMIT_S = 30.0


@pytest.fixture(scope="module")
def sound() -> Iterator[Path]:
    """A folder with the memory above."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "device"
        folder.mkdir()
        stripes = Stripes.create(folder, _PART, Layout.of(_DATA))
        for number, digest in enumerate(_DIGESTS):
            if digest is not None:
                stripe, offset = stripes.layout.place(number)
                piece = _MEMORY[number * _PIECE :][:_PIECE]
                with stripes.path(stripe).open("r+b") as file:
                    file.seek(offset)
                    file.write(piece)
        stripes.close()
        yield folder


def _loaded(folder: Path, data: DeviceData) -> bytes | None:
    """The memory; None if reading it was refused, which checking must do too then."""
    fd = os.memfd_create("destination")
    try:
        os.ftruncate(fd, data.size_bytes)
        reader = DeviceReader(
            FolderPieces(folder, {_PART: data}, threads=2), [FileDestination(_PART, fd, data.size_bytes)]
        )
        try:
            reader.start()
            assert reader.wait(_LIMIT_S)
        finally:
            reader.cancel()
        return os.pread(fd, data.size_bytes + 1, 0)
    except SnapshotError as e:
        return None if e.path and e.hint else b"no explanation"
    finally:
        os.close(fd)


def _damage(data: st.DataObject, path: Path) -> None:
    """Change one of the files, or put something else in its place."""
    kind = data.draw(
        st.sampled_from(["byte", "byte", "cut", "longer", "hole", "gone", "link", "pipe", "folder", "swap", "closed"])
    )
    size_bytes = path.stat().st_size if path.is_file() else 0
    if kind in ("byte", "hole") and size_bytes:
        with path.open("r+b") as file:
            at = data.draw(st.integers(0, size_bytes - 1))
            file.seek(at)
            before = file.read(1)
            file.seek(at)
            file.write(bytes(min(_PAGE, size_bytes - at)) if kind == "hole" else bytes([before[0] ^ 1]))
    elif kind == "cut" and size_bytes:
        os.truncate(path, data.draw(st.integers(0, size_bytes - 1)))
    elif kind == "longer" and size_bytes:
        os.truncate(path, size_bytes + data.draw(st.sampled_from([1, _PAGE, 1 << 40])))
    elif kind == "closed" and size_bytes:
        path.chmod(0)
    elif kind == "swap":
        other = path.with_name(f"{_PART}.{data.draw(st.integers(0, 3))}")
        if other.is_file() and path.is_file() and other != path:  # by name: one may be a hole of 1 TiB
            path.rename(path.with_suffix(".swapped"))
            other.rename(path)
            path.with_suffix(".swapped").rename(other)
    elif kind in ("gone", "link", "pipe", "folder") and path.is_file():
        path.rename(path.with_suffix(".kept"))
        if kind == "link":
            path.symlink_to(path.with_suffix(".kept"))
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_damaged_stripes(sound: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "device"
        shutil.copytree(sound, folder)
        for _ in range(data.draw(st.integers(0, 3))):
            _damage(data, folder / f"{_PART}.{data.draw(st.integers(0, 3))}")
        found = _loaded(folder, _DATA)
        assert found in (None, _MEMORY)
        for check in (verify, check_shape):
            with contextlib.suppress(SnapshotError):
                check(folder, {_PART: _DATA})
                assert check is check_shape or found is not None, "it is checked, and cannot be loaded"


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_a_manifest_of_other_stripes(sound: Path, data: st.DataObject) -> None:
    """The files are sound, and what is said of them is not: sizes, pieces, files, digests."""
    pages = data.draw(st.integers(0, len(_MEMORY) // _PAGE + 4))
    piece_bytes = data.draw(st.sampled_from([_PAGE, _PIECE, 4 * _PAGE, 1 << 30]))
    size_bytes = data.draw(st.sampled_from([len(_MEMORY), pages * _PAGE]))
    count = -(-size_bytes // piece_bytes)
    digests = [*_DIGESTS, None, "ab" * 32]
    picked = data.draw(st.lists(st.sampled_from(digests), min_size=count, max_size=count) | st.just(_DIGESTS[:count]))
    try:
        forged = replace(
            _DATA,
            size_bytes=size_bytes,
            piece_bytes=piece_bytes,
            stripes=data.draw(st.sampled_from([1, 3, 4, 4, 256])),
            sha256=tuple(picked),
        )
    except RecordError:
        return
    found = _loaded(sound, forged)
    if found is not None:
        pieces = [found[start : start + piece_bytes] for start in range(0, size_bytes, piece_bytes)]
        assert [hashlib.sha256(each).hexdigest() if any(each) else None for each in pieces] == list(forged.sha256)
