"""Find staging in a process's memory maps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from gpucr.linux.memory import Mapping, new_anonymous_ranges, present_prefix, read_maps
from gpucr.linux.processes import PROC
from gpucr.linux.tmpfs import FILE_NAME
from gpucr.model import Extent, StagedExtent

_SMALLEST_BYTES = 1 << 20
"""Smaller new ranges are the application's own: its CPU threads keep running during a checkpoint."""

_UNSETTLED_BYTES = 16 << 20
"""How much the driver may still be writing before the last page that it touched.

It copies block by block, and memcpy may write a block's first or last bytes at any time. Seen (H200, driver 580): it
reads up to 1.4 MiB ahead of the first byte that it has not read yet.
"""


def locate(before: tuple[Mapping, ...], after: tuple[Mapping, ...]) -> tuple[Extent, ...]:
    """The private extents that a checkpoint added, from the maps read before and after it."""
    return tuple(extent for extent in new_anonymous_ranges(before, after) if extent.size_bytes >= _SMALLEST_BYTES)


def file_extents(pid: int, name: str = FILE_NAME) -> tuple[StagedExtent, ...]:
    """The parts of gpucr's staging file, or another file of this name, that the process has mapped, in file order."""
    found = [
        StagedExtent(mapping.start, mapping.end - mapping.start, mapping.offset)
        for mapping in read_maps(pid)
        if mapping.path.startswith(f"/{name}") and mapping.permissions.startswith("rw-s")
    ]
    return tuple(sorted(found, key=lambda extent: extent.offset))


def keep_file(pid: int, kept: contextlib.ExitStack) -> None:
    """Keep the process's staging file open during ``kept``: the job need not wait until tens of GiB are freed."""
    with contextlib.suppress(OSError):  # not root: then there is no such file
        extents = file_extents(pid)
        if extents:
            kept.callback(os.close, open_file(pid, extents[0]))


def open_file(pid: int, extent: StagedExtent) -> int:
    """A descriptor of the staging file that the process has mapped at this extent.

    Needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE (proc_pid_map_files(5)). Raises OSError.
    """
    name = f"{extent.address:x}-{extent.end:x}"
    return os.open(PROC / str(pid) / "map_files" / name, os.O_RDWR | os.O_CLOEXEC)


def filled_bytes(pid: int, extents: Sequence[StagedExtent]) -> int:
    """How much of the staging file, from its beginning, the driver has filled and presumably finished.

    Seen from the pages in the process's page table: gpucr may have allocated the file's memory before, but a page
    enters that table when the process touches it. The driver's ascending order is not guaranteed, so what is read early
    must be compared again when the driver has finished.
    """
    for extent in reversed(extents):
        present = present_prefix(pid, extent.address, extent.size_bytes)
        if present > 0:
            return max(0, extent.offset + present - _UNSETTLED_BYTES)  # also across extents
    return 0


def total_bytes(extents: Sequence[Extent | StagedExtent]) -> int:
    """The size of all extents together."""
    return sum(extent.size_bytes for extent in extents)
