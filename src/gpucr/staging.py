"""Where the driver leaves a process's device memory while it is checkpointed.

Measured (H200, driver 580): the restore thread makes one private anonymous mapping per checkpoint, as large as all of
the process's device memory, and unmaps it on restore. The plain way to find it is to compare the process's memory
maps from before and after the checkpoint.
"""

from __future__ import annotations

from gpucr.linux.memory import Mapping, new_anonymous_ranges
from gpucr.model import Extent

_SMALLEST_BYTES = 1 << 20
"""Smaller new ranges are the application's own: its CPU threads go on during a checkpoint."""


def locate(before: tuple[Mapping, ...], after: tuple[Mapping, ...]) -> tuple[Extent, ...]:
    """The extents that a checkpoint added, from the maps read before and after it."""
    return tuple(extent for extent in new_anonymous_ranges(before, after) if extent.size_bytes >= _SMALLEST_BYTES)


def total_bytes(extents: tuple[Extent, ...]) -> int:
    """The size of all extents together."""
    return sum(extent.size_bytes for extent in extents)
