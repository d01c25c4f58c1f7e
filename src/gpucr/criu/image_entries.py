"""The common format of CRIU's images: two magic numbers, then entries, each a length and a protobuf message.

See https://criu.org/Images. A snapshot may be damaged or forged: every length is checked against the rest of the file
and the entry's maximum.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from google.protobuf.message import DecodeError, Message

_COMMON_MAGIC = 0x54564319
_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<I")

OpenImage = Callable[[str], BinaryIO]
"""Opens an image by its bare name, readable and seekable. Raises FileNotFoundError and other OSErrors."""

M = TypeVar("M", bound=Message)


class ImageError(ValueError):
    """The image is invalid. The message says why; the caller adds the path."""


def head(magic: int) -> bytes:
    """The magic numbers of this kind of image."""
    return _HEAD.pack(_COMMON_MAGIC, magic)


def encoded(entry: Message) -> bytes:
    """An entry as stored in an image."""
    body = entry.SerializeToString()
    return _LENGTH.pack(len(body)) + body


def images_in(folder: Path, *, follows_links: bool = False) -> OpenImage:
    """The images of a folder."""
    nofollow = 0 if follows_links else os.O_NOFOLLOW

    def open_image(name: str) -> BinaryIO:
        # Without O_NONBLOCK the open of a named pipe waits for a writer that never comes.
        fd = os.open(f"{folder}/{name}", os.O_RDONLY | nofollow | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is not a plain file", str(folder / name))
        return os.fdopen(fd, "rb")

    return open_image


class ImageReader:
    """Reads one image from start to end. Holds one entry at a time.

    ``kind`` is for messages, ``max_bytes`` and ``max_entry_bytes`` their maximum sizes.
    """

    def __init__(
        self, stream: BinaryIO, magic: int, kind: str, *, max_bytes: int, max_entry_bytes: int = 1 << 20
    ) -> None:
        """Raises ImageError if it is no image of this kind, and OSError."""
        self._stream = stream
        self._size_bytes = stream.seek(0, os.SEEK_END)
        self._max_entry_bytes = max_entry_bytes
        self._position = _HEAD.size
        if self._size_bytes > max_bytes:
            raise ImageError(f"it is larger than {max_bytes} bytes")
        stream.seek(0)
        if stream.read(_HEAD.size) != head(magic):
            raise ImageError(f"it does not begin as an image of {kind}")

    @classmethod
    def of_bytes(cls, data: bytes, magic: int, kind: str, *, max_bytes: int) -> ImageReader:
        """An image in memory."""
        return cls(io.BytesIO(data), magic, kind, max_bytes=max_bytes)

    def one(self, message: type[M]) -> M:
        """The next entry. Raises ImageError if there is none, or one that is damaged."""
        for entry in self.entries(message):
            return entry
        raise ImageError("it ends too early")

    def entries(self, message: type[M]) -> Iterator[M]:
        """All entries that are left. Raises ImageError if one is damaged."""
        while self._position < self._size_bytes:
            yield self._next(message)

    def _next(self, message: type[M]) -> M:
        start = self._position + _LENGTH.size
        if start > self._size_bytes:
            raise ImageError("it is cut off")
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > self._max_entry_bytes or start + length > self._size_bytes:
            raise ImageError(f"the entry at byte {self._position} is longer than can be")
        self._position = start + length
        try:
            entry = message.FromString(self._read(length))
        except DecodeError as e:
            raise ImageError(f"the entry at byte {start} is damaged") from e
        if not entry.IsInitialized():
            raise ImageError(f"the entry at byte {start} lacks a member")
        return entry

    def _read(self, size_bytes: int) -> bytes:
        data = self._stream.read(size_bytes)
        if len(data) != size_bytes:  # truncated while being read
            raise ImageError("it is cut off")
        return data
