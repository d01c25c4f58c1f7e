"""What CRIU opens and makes by name in a restore, as its images have it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from msgspec import Struct

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import OpenImage
from gpucr.criu.images import MAX_IMAGE_BYTES, NAME, FilesImage
from gpucr.criu.linked_files import GHOST, read_remaps

_SPECIAL = ("/proc/", "/sys/", "/dev/")


class Reopened(Struct, frozen=True):
    """A file or folder that CRIU opens by this name, for reading or writing. ``mode``: what it must have (stat(2))."""

    path: str
    mode: int | None
    is_read: bool
    is_written: bool


def reopened(open_image: OpenImage) -> tuple[tuple[Reopened, ...], frozenset[str]]:
    """The files and folders of one tree, and the folders in which CRIU makes files for a moment.

    Those below /dev, /proc and /sys are left out. Raises OSError, and ImageError if an image is damaged.
    """
    with open_image(NAME) as stream:
        image = FilesImage.parse(stream.read(MAX_IMAGE_BYTES + 1))
    remaps: list[images_pb2.Remap] = []
    with contextlib.suppress(FileNotFoundError):
        remaps = read_remaps(open_image)
    gone, paths = {each.orig_id for each in remaps}, image.paths()
    made = {os.path.dirname(paths.get(each.orig_id, "")) for each in remaps if each.remap_type == GHOST}
    return tuple(_files(image, gone)), frozenset(each for each in made if each and not _is_special(each))


def _files(image: FilesImage, gone: set[int]) -> Iterator[Reopened]:
    terminals = image.terminals()
    for entry in image.entries:
        file, path = entry.reg, os.fsdecode(entry.reg.name)
        if entry.HasField("reg") and file.id not in gone | terminals and not file.ext and not _is_special(path):
            access = file.flags & os.O_ACCMODE
            is_used = not file.flags & os.O_PATH
            yield Reopened(
                path,
                file.mode if file.HasField("mode") else None,
                is_read=is_used and access != os.O_WRONLY,
                is_written=is_used and access != os.O_RDONLY,
            )


def _is_special(path: str) -> bool:
    return f"{path}/".startswith(_SPECIAL)
