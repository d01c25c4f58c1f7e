"""gpucr.criu.tcp_streams: which connections are corrected, and what stays of their images."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageError, ImageReader
from gpucr.criu.tcp_streams import MAGIC, correct_streams
from tests.criu.test_image_contents import image

LAST = (1 << 32) - 1
UNKNOWN = bytes([0x08, 3, 0x18, 0])  # inq_len 3, outq_len 0: gpucr's messages do not have them
NAME = "tcp-stream-5.img"


def write(folder: Path, entry: images_pb2.TcpStream) -> bytes:
    """The image, with the three bytes that are in the queue."""
    known = images_pb2.TcpStream.FromString(UNKNOWN + entry.SerializeToString())
    data = image(MAGIC, known) + b"abc"
    (folder / NAME).write_bytes(data)
    return data


def entry_of(folder: Path) -> images_pb2.TcpStream:
    with (folder / NAME).open("rb") as stream:
        found = ImageReader(stream, MAGIC, "", max_bytes=1 << 20).one(images_pb2.TcpStream)
        assert stream.read() == b"abc"
    assert UNKNOWN[:2] in found.SerializeToString()
    return found


@pytest.mark.parametrize(
    ("next_byte", "window", "told_at", "is_refused"),
    [
        (1000, 0, 7144, True),
        (1000, 0, 1000, False),
        (1000, 6144, 7144, False),
        (1000, 6143, 7144, True),
        (1000, 0, 999, False),
        (LAST, 0, 6143, True),
        (LAST, 6144, 6143, False),
        (5, 0, LAST, False),
    ],
)
def test_windows(tmp_path: Path, next_byte: int, window: int, told_at: int, is_refused: bool) -> None:
    """Sequence numbers begin again at 0."""
    before = write(tmp_path, images_pb2.TcpStream(inq_seq=next_byte, rcv_wnd=window, snd_wl1=told_at))
    (tmp_path / NAME).chmod(0o640)
    assert correct_streams(tmp_path) == is_refused
    if is_refused:
        found = entry_of(tmp_path)
        assert (found.inq_seq, found.rcv_wnd, found.snd_wl1) == (next_byte, window, next_byte)
        assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o640
        assert correct_streams(tmp_path) == 0
    else:
        assert (tmp_path / NAME).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_connection_without_a_window(tmp_path: Path) -> None:
    before = write(tmp_path, images_pb2.TcpStream(inq_seq=1000))
    assert correct_streams(tmp_path) == 0
    assert (tmp_path / NAME).read_bytes() == before


def test_data_that_was_never_sent_counts_as_sent(tmp_path: Path) -> None:
    write(tmp_path, images_pb2.TcpStream(inq_seq=1000, unsq_len=3))
    assert correct_streams(tmp_path) == 1
    assert (entry_of(tmp_path).unsq_len, entry_of(tmp_path).inq_seq) == (0, 1000)
    assert correct_streams(tmp_path) == 0


def test_a_damaged_image(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"nothing")
    with pytest.raises(ImageError, match="it does not begin as an image of a TCP connection"):
        correct_streams(tmp_path)
