"""Who holds a process's device memory while it is away from its GPU: the protocol.

Every process has a stack of backends. The lowest, level 0, holds what the driver's checkpoint moves off the GPU:
`plain`, `captured` or `custom_storage`. A backend above it takes most of the memory away before that, and leaves to the
driver what only the driver can move. The processes of a gang may have different stacks. `order.Order` says when each is
called; `holders.Holders` has those of one kind.

A restored process is a new one: there a `Return` per level brings back the snapshot's content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from gpucr.gpu_state.source import Destination, Source
from gpucr.model import DevicePart, StagedExtent

if TYPE_CHECKING:
    from gpucr.undo.protection import Protection
    from gpucr.undo.steps import Meter

CAPTURED, PLAIN, INTERPOSED, CUSTOM_STORAGE = "captured", "plain", "interposed", "custom_storage"


class Stored(Protocol):
    """A part of one process's device memory that is away from its GPU.

    ``kind`` is as in the manifest; ``extents``: where in the process the source's bytes belong (none: all of it is in
    CRIU's images).
    """

    @property
    def part(self) -> DevicePart:
        """Which process it is of, and its level in that process's stack."""

    @property
    def kind(self) -> str:
        """The kind of the backend that took it, as in the manifest."""

    @property
    def extents(self) -> tuple[StagedExtent, ...]:
        """Where the bytes of `source` were in the process, with their offsets in it."""

    @property
    def source(self) -> Source | None:
        """The readable data; may grow until `complete`. None: nothing, or not yet."""

    def close(self) -> None:
        """Free what holds the data. Idempotent."""


class Backend(Stored, Protocol):
    """Holds a part of one process's device memory, once.

    From `complete` until `close` the source returns the same bytes, even if the process runs again.
    """

    def available_bytes(self) -> int:
        """How much of the source, from its beginning, is known to be ready."""

    def prepare(self, size_bytes: int) -> int:
        """The process runs, and holds about this much that no backend above takes: begin to make room.

        Returns how much of it this one will take.
        """

    def wait_prepared(self) -> None:
        """Wait until `prepare`'s work is done."""

    def begin(self, restore_thread: int, meter: Meter, deadline: float | None) -> None:
        """The whole gang is LOCKED. Above level 0: begin to take memory out of the process.

        At level 0: be ready for the driver's checkpoint.
        """

    def wait_started(self) -> None:
        """Wait until the memory has left the process, copied or not (level 0: until the driver may begin)."""

    def complete(self, meter: Meter) -> None:
        """The driver has checkpointed the whole gang. After this the source is final."""

    def abort(self) -> None:
        """Something failed, before or after `complete`: stop, the data is not needed.

        After `give_back` the process is as `begin` found it.
        """

    def make_way(self) -> None:
        """The driver is about to restore the process: free what gpucr itself uses on its GPUs."""

    def give_back(self) -> None:
        """The process is LOCKED, the driver has restored it: put back what is away. Idempotent.

        Level 0: nothing, the driver has done it. Raises GpucrError or OSError: then no process of the gang runs.
        """


WaitForBytes = Callable[[int], int]
"""Waits until a destination is filled up to this position, and returns how far it is filled. May raise to give up."""


class Return(Protocol):
    """Brings a part of one process's device memory back into a process that CRIU has made."""

    @property
    def destination(self) -> Destination:
        """Where the snapshot's bytes go, in order."""

    @property
    def note(self) -> str | None:
        """How it works, for users who want to know."""

    def begin(self, pid: int, restore_thread: int, wait: WaitForBytes, *, stays: bool) -> None:
        """The process is CHECKPOINTED; the driver restores it next, unless it ``stays`` so.

        Above level 0: the driver has restored the whole gang, all LOCKED. Put the memory where it was.
        """

    def finish(self) -> None:
        """Level 0: the driver's restore has returned. All memory is back in place. Raises what `begin` may."""

    def close(self) -> None:
        """Free what held the data. Idempotent."""


class Kind(Protocol):
    """A kind of backend above the driver's. `kinds.register` makes dumps use it and restores know it."""

    @property
    def name(self) -> str:
        """Lower-case letters, digits and underscores; stored in the manifest."""

    def backend_for(self, part: DevicePart, protection: Protection) -> Backend | None:
        """A backend for this running process at this level; None if the kind does not apply.

        It names its recovery actions to ``protection`` before it changes anything.
        """

    def missing(self) -> str | None:
        """What this machine lacks to restore memory of this kind (None: nothing)."""

    def return_for(self, part: DevicePart, extents: Sequence[StagedExtent], size_bytes: int) -> Return:
        """A `Return` for this much memory. Raises Unsupported."""
