"""Windows of TCP connections, as CRIU dumps them, that the kernel would refuse at a restore.

A receiver whose memory is full drops what has come, and announces a window of 0 (Linux 6.18). Such a segment may have
been the last to bring the other end's window, and it began (``snd_wl1``) behind what may come now. TCP_REPAIR_WINDOW
takes no such value: EINVAL, and no restore of this snapshot succeeds (seen with CRIU 4.2.1 and 200 connections whose
readers were frozen, one dump in 28). What was dropped is sent again from the next byte that is to come, so that byte
stands for the segment.
"""

from __future__ import annotations

import os
from pathlib import Path

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageReader, encoded, head, images_in

MAGIC, KIND = 0x51465506, "a TCP connection"  # TCP_STREAM_MAGIC of CRIU's image format
_MAX_BYTES = 1 << 33
_MODULUS = 1 << 32
_COPY_BYTES = 16 << 20
_NEW = "corrected-stream"


def correct_windows(images_dir: Path) -> int:
    """Correct the images of these connections. Returns how many there were. Raises OSError, and ImageError."""
    return sum(_correct(images_dir, path.name) for path in sorted(images_dir.glob("tcp-stream-*.img")))


def _correct(images_dir: Path, name: str) -> bool:
    with images_in(images_dir)(name) as stream:
        reader = ImageReader(stream, MAGIC, KIND, max_bytes=_MAX_BYTES)
        entry = reader.one(images_pb2.TcpStream)
        if not _is_behind_the_window(entry):
            return False
        entry.snd_wl1 = entry.inq_seq
        mode = os.fstat(stream.fileno()).st_mode
        fd = os.open(images_dir / _NEW, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as new:
            new.write(head(MAGIC) + encoded(entry))
            while data := stream.read(_COPY_BYTES):
                new.write(data)
            os.fchmod(fd, mode & 0o777)
    (images_dir / _NEW).rename(images_dir / name)
    return True


def _is_behind_the_window(entry: images_pb2.TcpStream) -> bool:
    if not entry.HasField("snd_wl1"):
        return False
    beyond = (entry.snd_wl1 - entry.inq_seq - entry.rcv_wnd) % _MODULUS
    return 0 < beyond < _MODULUS // 2
