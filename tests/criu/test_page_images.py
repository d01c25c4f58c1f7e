"""gpucr.criu.page_images: pieces follow addresses, and unknown images are skipped."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucr.criu import images_pb2, page_images
from gpucr.criu.image_entries import ImageError, head
from gpucr.criu.imaged_memory import PAGEMAP_MAGIC

PAGE = 4096
PIECE = 4 * PAGE
PRESENT, PARENT = 4, 1


def pagemap(pages_id: int, *runs: tuple[int, int, int]) -> bytes:
    """An image of runs: first page, number of pages, flags."""
    messages: list[images_pb2.PagemapHead | images_pb2.PagemapEntry] = [images_pb2.PagemapHead(pages_id=pages_id)]
    for page, count, flags in runs:
        messages.append(
            images_pb2.PagemapEntry(vaddr=page * PAGE, compat_nr_pages=count & 0xFFFF, nr_pages=count, flags=flags)
        )
    bodies = [message.SerializeToString() for message in messages]
    return head(PAGEMAP_MAGIC) + b"".join(struct.pack("<I", len(body)) + body for body in bodies)


def write(folder: Path, number: int, data: bytes, pages: int) -> None:
    (folder / f"pagemap-{number}.img").write_bytes(data)
    (folder / f"pages-{number}.img").write_bytes(bytes(pages * PAGE))


def cuts(folder: Path, *runs: tuple[int, int, int], pages: int) -> Sequence[int]:
    """In pages."""
    write(folder, 1, pagemap(1, *runs), pages)
    return [start // PAGE for start in page_images.cuts(folder, PIECE)["pages-1.img"]]


def test_a_piece_is_a_window_of_addresses(tmp_path: Path) -> None:
    assert cuts(tmp_path, (4, 8, PRESENT), pages=8) == [0, 4]
    assert cuts(tmp_path, (6, 8, PRESENT), pages=8) == [0, 2, 6]
    assert cuts(tmp_path, (4, 1, PRESENT), (6, 1, PRESENT), (8, 1, PRESENT), (400, 1, PRESENT), pages=4) == [0, 2, 3]


def test_an_added_page_changes_one_piece(tmp_path: Path) -> None:
    def ends(*runs: tuple[int, int, int], pages: int) -> list[int]:
        return [pages - start for start in cuts(tmp_path, *runs, pages=pages)]

    before = ends((5, 1, PRESENT), (8, 40, PRESENT), pages=41)
    after = ends((5, 2, PRESENT), (8, 40, PRESENT), pages=42)
    assert before[1:] == after[1:]


def test_pages_in_parent_images_do_not_count(tmp_path: Path) -> None:
    assert cuts(tmp_path, (4, 4, PRESENT), (8, 100, PARENT), (108, 4, PRESENT), pages=8) == [0, 4]


def test_unknown_images_are_skipped(tmp_path: Path) -> None:
    good = pagemap(1, (4, 8, PRESENT))
    for data, pages in (
        (good, 7),
        (good[:-1], 8),
        (good[:10], 8),
        (b"", 8),
        (bytes(8) + good[8:], 8),
        (good[:8] + b"\xff" * 12, 8),
    ):
        write(tmp_path, 1, data, pages)
        assert page_images.cuts(tmp_path, PIECE) == {}
    (tmp_path / "pages-1.img").unlink()
    write(tmp_path, 2, pagemap(9, (4, 8, PRESENT)), 8)
    assert page_images.cuts(tmp_path, PIECE) == {}


def test_a_map_larger_than_its_pages_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, 1, pagemap(1, (4, 1 << 31, PRESENT)), 8)
    assert page_images.cuts(tmp_path, PIECE) == {}


@settings(deadline=None, database=None, max_examples=60)
@given(st.data())
def test_arbitrary_bytes_are_a_map_or_refused(data: st.DataObject) -> None:
    whole = pagemap(1, (4, 8, PRESENT), (40, 3, PARENT), (50, 1, PRESENT))
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(whole) - 1))
        changed = bytearray(whole)
        changed[place] ^= data.draw(st.integers(1, 255))
        image = bytes(changed[: data.draw(st.integers(0, len(whole)))])
    else:
        image = data.draw(st.binary(max_size=100))
    try:
        found = page_images.PageMap.read(io.BytesIO(image))
    except ImageError:
        return
    if found.size_bytes <= 100 * PAGE:
        pieces = found.cut(PIECE)
        assert sum(piece.size_bytes for piece in pieces) == found.size_bytes
        assert all(0 < piece.size_bytes <= PIECE or not found.size_bytes for piece in pieces)


@pytest.mark.criu
def test_this_crius_images_are_understood(process_without_cuda: int, tmp_path: Path) -> None:
    import gpucr

    gpucr.dump(process_without_cuda, tmp_path / "s", leave_running=True)
    images = tmp_path / "s" / "images"
    found = page_images.cuts(images, 1 << 20)
    assert set(found) == {path.name for path in images.glob("pages-*.img")} != set()
    for name, starts in found.items():
        size = (images / name).stat().st_size
        lengths = [end - start for start, end in zip(starts, [*starts[1:], size], strict=True)]
        assert all(0 < length <= 1 << 20 for length in lengths)
        assert len(lengths) > 1
