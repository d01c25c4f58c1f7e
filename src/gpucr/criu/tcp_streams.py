"""What CRIU dumps of TCP connections, corrected where no restore could use it.

A receiver whose memory is full drops what has come, and announces a window of 0 (Linux 6.18). Such a segment may have
been the last to bring the other end's window, and it began (``snd_wl1``) behind what may come now. TCP_REPAIR_WINDOW
takes no such value: EINVAL, and no restore of this snapshot succeeds (seen with CRIU 4.2.1 and 200 connections whose
readers were frozen, one dump in 28). What was dropped is sent again from the next byte that is to come, so that byte
stands for the segment.

What a process has written to a full connection was never sent. CRIU leaves the repair mode to put it back, so that the
kernel sends it at once. Where the other end is in the same job it does not exist yet: the kernel answers with a reset,
and CRIU fails (EPIPE, each time, CRIU 4.2.1). So it counts as sent: the kernel sends it again when nobody acknowledges
it, as the other end's window allows (RFC 9293, 3.8.1).
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


def correct_streams(images_dir: Path) -> int:
    """Correct the images of connections. Returns how many were not right. Raises OSError, and ImageError."""
    return sum(_correct(images_dir, path.name) for path in _images(images_dir))


def waiting_bytes(images_dir: Path) -> int:
    """How much data waits in these connections, to be read or to be sent, and a little more. Raises OSError."""
    return sum(path.stat().st_size for path in _images(images_dir))


def _images(images_dir: Path) -> list[Path]:
    return sorted(images_dir.glob("tcp-stream-*.img"))


def _correct(images_dir: Path, name: str) -> bool:
    with images_in(images_dir)(name) as stream:
        reader = ImageReader(stream, MAGIC, KIND, max_bytes=_MAX_BYTES)
        entry = reader.one(images_pb2.TcpStream)
        before = entry.SerializeToString()
        if _is_behind_the_window(entry):
            entry.snd_wl1 = entry.inq_seq
        if entry.unsq_len:
            entry.unsq_len = 0
        if entry.SerializeToString() == before:
            return False
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
