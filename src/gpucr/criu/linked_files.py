"""Files whose opened name is gone while another hard link remains: their content goes into the images.

CRIU gives such a file a new name beside the old one (``link_remap.N``) and stores only that name. The first restore
uses it up, and a dump that leaves the job running removes it. For a file without any name, a *ghost*, CRIU stores the
content in an image instead: so after a dump every link_remap name is converted to a ghost.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageError, ImageReader, OpenImage, encoded, head, images_in
from gpucr.criu.images import FilesImage
from gpucr.linux.sparse import data_ranges

REMAP_IMAGE = "remap-fpath.img"
REMAP_MAGIC, GHOST_MAGIC = 0x59133954, 0x52583605  # REMAP_FPATH_MAGIC, GHOST_FILE_MAGIC of CRIU's image format
LINKED, GHOST = 0, 1  # remap_type
_MAX_REMAP_BYTES = 16 << 20
_LARGEST_GHOST = (1 << 28) - 1
_CALL_BYTES = 64 << 20
"""Size of one sendfile(2): signals are handled in between."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def save_linked_files(
    images_dir: Path, root: Path, inodes: Collection[tuple[int, int]], *, leave_out: str
) -> tuple[str, ...]:
    """Convert CRIU's new names to ghosts, while the tree is frozen and the images are complete.

    ``root`` is the tree's root folder as seen from here, ``inodes`` (device and number) are the files that it uses:
    nothing else is read, even if it has such a name. Names below the folder ``leave_out`` stay as they are. Returns the
    names, as the tree sees them, that no restore needs any more. Raises OSError, and ImageError if images and files
    disagree.
    """
    try:
        entries = read_remaps(images_in(images_dir))
    except FileNotFoundError:
        return ()
    paths = FilesImage.read(images_dir).paths()
    next_id = 1 + max((each.remap_id for each in entries if each.remap_type == GHOST), default=0)
    ghosts: dict[tuple[int, int], int] = {}
    names: list[str] = []
    for entry in entries:
        if entry.remap_type != LINKED:
            continue
        if entry.remap_id not in paths:
            raise ImageError(f"there is no file {entry.remap_id}, to which another one leads")
        path = paths[entry.remap_id]
        if path.startswith(f"{leave_out}/"):
            continue
        source = os.open(root / path.lstrip("/"), _READ)
        try:
            status = os.fstat(source)
            inode = status.st_dev, status.st_ino
            if inode not in inodes or not stat.S_ISREG(status.st_mode):
                raise ImageError(f"{path} is not the file of the job that CRIU has linked there")
            if inode not in ghosts:
                ghosts[inode] = next_id
                _write_ghost(images_dir / f"ghost-file-{next_id:x}.img", source, status)
                next_id += 1
        finally:
            os.close(source)
        entry.remap_id, entry.remap_type = ghosts[inode], GHOST
        names.append(path)
    if names:
        _write_remaps(images_dir, entries)
    return tuple(names)


@dataclass(frozen=True)
class Ghosts:
    """Files without a name that a restore makes again, with numbers that no other restore has.

    ``names``: as the tree sees them, for a moment. ``changed`` and ``renamed``: the images to restore from, and new
    names of others by old ones.
    """

    names: tuple[str, ...] = ()
    changed: Mapping[str, bytes] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)


def own_ghosts(images_dir: Path) -> Ghosts:
    """Those of these images. Raises OSError, and ImageError for damaged images.

    CRIU counts from 1, and makes ``PATH.cr.NUMBER.ghost``. Two restores at once of jobs that had deleted files of the
    same name would find each other's, fail, and remove them (seen with OpenMPI's ``/dev/shm/open_mpi.0000`` and CRIU
    4.2.1: "Can't create ghost regfile: File exists").
    """
    try:
        entries = read_remaps(images_in(images_dir))
    except FileNotFoundError:
        return Ghosts()
    ghosts = [each for each in entries if each.remap_type == GHOST]
    if not ghosts:
        return Ghosts()
    paths = FilesImage.read(images_dir).paths()
    old = dict.fromkeys(each.remap_id for each in ghosts)
    new = dict(zip(old, _numbers(len(old)), strict=True))
    for each in ghosts:
        each.remap_id = new[each.remap_id]
    names = (f"{paths[each.orig_id]}.cr.{each.remap_id:x}.ghost" for each in ghosts if each.orig_id in paths)
    renamed = {f"ghost-file-{number:x}.img": f"ghost-file-{own:x}.img" for number, own in new.items()}
    return Ghosts(tuple(dict.fromkeys(names)), {REMAP_IMAGE: _remaps(entries)}, renamed)


def _numbers(count: int) -> range:
    """So many in a row that no other restore has, as good as surely. They are not long: names may be 255 bytes long."""
    first = 1 + int(os.urandom(8).hex(), 16) % (_LARGEST_GHOST - count)
    return range(first, first + count)


def read_remaps(open_image: OpenImage) -> list[images_pb2.Remap]:
    """The files whose names are gone. Raises FileNotFoundError if there are none, OSError, and ImageError."""
    with open_image(REMAP_IMAGE) as stream:
        image = ImageReader(stream, REMAP_MAGIC, "names that are gone", max_bytes=_MAX_REMAP_BYTES)
        return list(image.entries(images_pb2.Remap))


def _write_remaps(images_dir: Path, entries: list[images_pb2.Remap]) -> None:
    (images_dir / REMAP_IMAGE).unlink()
    with _create(images_dir / REMAP_IMAGE) as image:
        image.write(_remaps(entries))


def _remaps(entries: list[images_pb2.Remap]) -> bytes:
    return b"".join([head(REMAP_MAGIC), *map(encoded, entries)])


def _write_ghost(path: Path, source: int, status: os.stat_result) -> None:
    """The file's metadata, then a head and the bytes of each part that is not a hole."""
    ghost = images_pb2.GhostFile(
        uid=status.st_uid, gid=status.st_gid, mode=status.st_mode, chunks=True, size=status.st_size
    )
    for time, nanoseconds in ((ghost.atim, status.st_atime_ns), (ghost.mtim, status.st_mtime_ns)):
        time.tv_sec, time.tv_usec = nanoseconds // 10**9, nanoseconds % 10**9 // 1000
    with _create(path) as image:
        image.write(head(GHOST_MAGIC))
        image.write(encoded(ghost))
        for begin, end in data_ranges(source, status.st_size):
            image.write(encoded(images_pb2.GhostChunk(off=begin, len=end - begin)))
            image.flush()
            _copy(source, image.fileno(), begin, end)


def _copy(source: int, target: int, begin: int, end: int) -> None:
    while begin < end:
        copied = os.sendfile(target, source, begin, min(_CALL_BYTES, end - begin))
        if copied == 0:
            raise OSError(errno.EIO, "a file of the job became shorter while it was copied")
        begin += copied


def _create(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, _CREATE, 0o600), "wb")
