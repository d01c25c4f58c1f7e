"""What CRIU's images say of a job's capabilities (capabilities(7)): a restore has to give them back."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageError, ImageReader, OpenImage

_MAGIC = 0x55053847  # CORE_MAGIC of CRIU's image format
_MAX_BYTES = 16 << 20
_WORD_BITS = 32


def capabilities_in(names: Iterable[str], open_image: OpenImage) -> int:
    """The capabilities that the job's threads had, permitted or inheritable, as a bit mask: all of them together.

    ``names`` are those of all its images. CRIU cannot give a thread a capability that it has not got itself. Raises
    OSError, and ImageError where an image is damaged.
    """
    wanted = 0
    for name in names:
        if not fnmatch(name, "core-*.img"):
            continue
        with open_image(name) as stream:
            core = ImageReader(stream, _MAGIC, "a process", max_bytes=_MAX_BYTES).one(images_pb2.Core)
        creds = core.thread_core.creds
        for words in (creds.cap_prm, creds.cap_inh):
            if len(words) > 2:
                raise ImageError("a capability set has more than 64 bits")
            wanted |= sum(word << (_WORD_BITS * position) for position, word in enumerate(words))
    return wanted
