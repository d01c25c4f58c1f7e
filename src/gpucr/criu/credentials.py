"""A job's capabilities (capabilities(7)) in CRIU's images: a restore needs at least these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageError, ImageReader, OpenImage

_MAGIC = 0x55053847  # CORE_MAGIC of CRIU's image format
_MAX_BYTES = 16 << 20
_WORD_BITS = 32


def credentials_in(names: Iterable[str], open_image: OpenImage) -> tuple[int, set[int]]:
    """The union of the capabilities, permitted or inheritable, of the job's threads, as a bit mask; their real users.

    ``names``: of all its images. CRIU cannot give a thread a capability that CRIU lacks. Raises OSError, and ImageError
    if an image is damaged.
    """
    wanted, uids = 0, set[int]()
    for core in _cores(names, open_image):
        creds = core.thread_core.creds
        uids.add(creds.uid)
        for words in (creds.cap_prm, creds.cap_inh):
            if len(words) > 2:
                raise ImageError("a capability set has more than 64 bits")
            wanted |= sum(word << (_WORD_BITS * position) for position, word in enumerate(words))
    return wanted, uids


def _cores(names: Iterable[str], open_image: OpenImage) -> Iterator[images_pb2.Core]:
    for name in names:
        if name.startswith("core-") and name.endswith(".img"):
            with open_image(name) as stream:
                yield ImageReader(stream, _MAGIC, "a process", max_bytes=_MAX_BYTES).one(images_pb2.Core)
