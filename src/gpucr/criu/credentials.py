"""A job's capabilities (capabilities(7)) in CRIU's images: a restore needs at least these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpucr.criu import images_pb2
from gpucr.criu.image_entries import ImageError, ImageReader, OpenImage, encoded, head

_MAGIC = 0x55053847  # CORE_MAGIC of CRIU's image format
_MAX_BYTES = 16 << 20
_WORD_BITS, _WHOLE_WORD = 32, 0xFFFFFFFF


def credentials_in(names: Iterable[str], open_image: OpenImage) -> tuple[int, set[int]]:
    """The union of the capabilities, permitted or inheritable, of the job's threads, as a bit mask; their real users.

    ``names``: of all its images. CRIU cannot give a thread a capability that CRIU lacks. Raises OSError, and ImageError
    if an image is damaged.
    """
    wanted, uids = 0, set[int]()
    for _, core in _cores(names, open_image):
        creds = core.thread_core.creds
        uids.add(creds.uid)
        for words in (creds.cap_prm, creds.cap_inh):
            if len(words) > 2:
                raise ImageError("a capability set has more than 64 bits")
            wanted |= sum(word << (_WORD_BITS * position) for position, word in enumerate(words))
    return wanted, uids


def with_full_bounding_sets(names: Iterable[str], open_image: OpenImage) -> dict[str, bytes]:
    """The images of its threads, by name, changed as if no bounding set had ever been reduced.

    CRIU drops what a thread's bounding set lacked, which needs CAP_SETPCAP, even if CRIU's own set lacks it too (seen
    with 4.2.1: "Unable to drop capability 24"). With these images it drops nothing: a thread gets the bounding set of
    the user who restores it, like everything else that he starts. Raises as `credentials_in`.
    """
    changed = {}
    for name, core in _cores(names, open_image):
        core.thread_core.creds.cap_bnd[:] = [_WHOLE_WORD, _WHOLE_WORD]
        changed[name] = head(_MAGIC) + encoded(core)
    return changed


def _cores(names: Iterable[str], open_image: OpenImage) -> Iterator[tuple[str, images_pb2.Core]]:
    for name in names:
        if name.startswith("core-") and name.endswith(".img"):
            with open_image(name) as stream:
                yield name, ImageReader(stream, _MAGIC, "a process", max_bytes=_MAX_BYTES).one(images_pb2.Core)
