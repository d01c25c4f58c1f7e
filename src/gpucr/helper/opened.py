"""The user's gpucr opens all files of a job with the user's rights and passes the descriptors to root's CRIU."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from google.protobuf.message import DecodeError

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageError, ImageReader, images_in
from gpucr.criu.imaged_memory import MAX_MM_BYTES, MM_MAGIC
from gpucr.criu.images import FilesImage
from gpucr.criu.linked_files import GHOST, GHOST_MAGIC, REMAP_IMAGE, REMAP_MAGIC
from gpucr.errors import Unsupported

_KEPT_FLAGS = (
    os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_DSYNC | os.O_SYNC | os.O_DIRECT | os.O_NOATIME | os.O_PATH
)
_MAX_BYTES = 16 << 20
_COPY_BYTES = 1 << 20
_MAX_CHUNK_BYTES, _MAX_FILE_BYTES = 1 << 40, (1 << 63) - 1


class OpenedFiles:
    """``fds``: descriptors by entry number in ``files.img``. Closed at the end of a `with` block.

    ``root``: the root folder of the sandbox in which they are opened, empty for none. ``outputs``: replacements for
    output files, opened at their end.
    """

    def __init__(self, root: str = "", outputs: Mapping[Path, Path] | None = None) -> None:
        self.fds: dict[int, int] = {}
        self._root = root
        self._outputs = {os.fspath(old): os.fspath(new) for old, new in (outputs or {}).items()}
        self._ghosts: dict[int, int] = {}

    def __enter__(self) -> OpenedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (*self.fds.values(), *self._ghosts.values()):
            with contextlib.suppress(OSError):
                os.close(fd)

    @classmethod
    def of(cls, images_dir: Path, root: str = "", outputs: Mapping[Path, Path] | None = None) -> OpenedFiles:
        """Open the files of these images. Raises Unsupported if one is missing or has changed; OSError."""
        found = cls(root, outputs)
        try:
            gone, written = _gone(images_dir), _mapped_to_write(images_dir)
            image = FilesImage.read(images_dir)
            terminals = image.terminals()  # CRIU recreates the pairs
            for entry in image.entries:
                if entry.HasField("reg") and entry.reg.id not in terminals:
                    if entry.reg.id in written:
                        entry.reg.flags = entry.reg.flags & ~os.O_ACCMODE | os.O_RDWR
                    found.fds[entry.reg.id] = found._open(entry.reg, gone.get(entry.reg.id), images_dir)
        except BaseException:
            found.__exit__()
            raise
        return found

    def _open(self, file: images_pb2.RegularFile, ghost: int | None, images_dir: Path) -> int:
        name = os.fsdecode(file.name)
        output = self._outputs.get(name)
        path = self._root + (output or name)
        try:
            if ghost is not None:
                if ghost not in self._ghosts:
                    image = images_dir / f"ghost-file-{ghost:x}.img"
                    self._ghosts[ghost] = _made_again(image, os.path.dirname(path), self._root + tempfile.gettempdir())
                path = f"/proc/self/fd/{self._ghosts[ghost]}"
            # O_NONBLOCK: the file may have been replaced by a named pipe.
            flags = file.flags & _KEPT_FLAGS if output is None else os.O_RDWR | os.O_APPEND
            fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                if output is None:
                    _require_same(file, fd)
                if not flags & os.O_PATH:
                    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_ACCMODE)
                    with contextlib.suppress(OSError):  # a device that has no position
                        os.lseek(fd, *((file.pos, os.SEEK_SET) if output is None else (0, os.SEEK_END)))
            except BaseException:
                os.close(fd)
                raise
        except OSError as e:
            raise Unsupported(
                f"{name}, which the job had open, cannot be opened: {e.strerror}",
                hint="put it back as it was at the dump",
            ) from e
        return fd


def _require_same(file: images_pb2.RegularFile, fd: int) -> None:
    status = os.fstat(fd)
    if file.HasField("mode") and stat.S_IFMT(file.mode) != stat.S_IFMT(status.st_mode):
        raise OSError(errno.ESTALE, "it is a file of another kind now")
    if file.HasField("size") and stat.S_ISREG(status.st_mode) and status.st_size != file.size:
        raise OSError(errno.ESTALE, f"it has {status.st_size} bytes, and had {file.size}")


def _gone(images_dir: Path) -> Mapping[int, int]:
    """Entries whose file has no name any more, with the number of the image that has its content."""
    try:
        with images_in(images_dir)(REMAP_IMAGE) as stream:
            reader = ImageReader(stream, REMAP_MAGIC, "names that are gone", max_bytes=_MAX_BYTES)
            return {
                each.orig_id: each.remap_id for each in reader.entries(images_pb2.Remap) if each.remap_type == GHOST
            }
    except FileNotFoundError:
        return {}


def _mapped_to_write(images_dir: Path) -> frozenset[int]:
    """Entries of files with a shared writable mapping: the mapping determines how to open them."""
    found: set[int] = set()
    for path in images_dir.glob("mm-*.img"):
        with images_in(images_dir)(path.name) as stream:
            reader = ImageReader(stream, MM_MAGIC, "mappings", max_bytes=MAX_MM_BYTES, max_entry_bytes=MAX_MM_BYTES)
            for each in reader.one(images_pb2.AddressSpace).vmas:
                if each.fdflags & os.O_ACCMODE == os.O_RDWR:
                    found.add(each.shmid)
    return frozenset(found)


def _made_again(image: Path, folder: str, otherwise: str) -> int:
    """An unnamed file with the image's content, in the original folder or else in ``otherwise``."""
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        fd = os.open(otherwise, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        _fill(fd, image)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _fill(fd: int, image: Path) -> None:
    with images_in(image.parent)(image.name) as stream:
        size_bytes = os.fstat(stream.fileno()).st_size
        reader = ImageReader(stream, GHOST_MAGIC, "a deleted file", max_bytes=_MAX_CHUNK_BYTES)
        ghost = reader.one(images_pb2.GhostFile)
        if ghost.size > _MAX_FILE_BYTES:
            raise ImageError("it has an impossible size")
        os.fchmod(fd, ghost.mode & 0o777)
        if not ghost.chunks:
            _copy(stream.fileno(), fd, stream.tell(), 0, size_bytes - stream.tell())
            return
        while stream.tell() < size_bytes:
            head = stream.read(4)
            body = stream.read(int.from_bytes(head, "little")) if len(head) == 4 else b""
            try:
                chunk = images_pb2.GhostChunk.FromString(body)
            except DecodeError as e:
                raise ImageError("it has a part that cannot be read") from e
            at = stream.tell()
            if chunk.len > size_bytes - at or chunk.off + chunk.len > ghost.size:
                raise ImageError("it is cut off")
            _copy(stream.fileno(), fd, at, chunk.off, chunk.len)
            stream.seek(at + chunk.len)
        os.ftruncate(fd, ghost.size)


def _copy(source: int, target: int, begin: int, to: int, count: int) -> None:
    while count > 0:
        data = os.pread(source, min(count, _COPY_BYTES), begin)
        if not data:
            raise OSError(errno.EIO, "a deleted file's image became shorter")
        os.pwrite(target, data, to)
        begin, to, count = begin + len(data), to + len(data), count - len(data)
