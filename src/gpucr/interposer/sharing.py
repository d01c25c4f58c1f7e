"""Who has whose device memory: plain data with the numbers of processes and blocks, which manifests hold too.

`owners` finds it out.
"""

from __future__ import annotations

from msgspec import Struct


class Part(Struct, frozen=True, array_like=True):
    """A block of process ``pid``, by its agent's numbers."""

    pid: int
    index: int
    generation: int


class Share(Struct, frozen=True, array_like=True):
    """What one process imported, and from whom."""

    imported: Part
    owner: Part
