"""Who holds a process's device memory while it is away from its GPU: the protocol.

Every process has a stack of backends. The lowest, level 0, holds what the driver's checkpoint moves off the GPU:
`plain`, `captured` or `custom_storage`. A backend over it has taken most of the memory away before that, and leaves the
driver what only the driver can move. The processes of a gang may have different stacks. All go through it together, so
that none runs while memory of another one is away:

    prepare (all run) -> all locked -> begin, from the highest level down -> the driver's checkpoint -> complete | abort
    the driver's restore -> give_back, from the lowest level up -> all unlocked

A restored process is another one: there a `Return` per level brings back what a snapshot has.
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

    ``kind`` is what the manifest says, ``extents`` where in the process the source's bytes belong (none: nothing of it
    is stored apart from CRIU's images).
    """

    @property
    def part(self) -> DevicePart:
        """Whose, and at which level."""

    @property
    def kind(self) -> str:
        """Which kind this is."""

    @property
    def extents(self) -> tuple[StagedExtent, ...]:
        """Where the bytes of `source` were, with their offsets in it."""

    @property
    def source(self) -> Source | None:
        """What can be read; it may grow until `complete`. None: nothing, or not yet."""

    def close(self) -> None:
        """Free what holds the data. Idempotent."""


class Backend(Stored, Protocol):
    """Holds a part of one process's device memory, once.

    From `complete` until `close` the source gives the same bytes, also when the process runs again.
    """

    def available_bytes(self) -> int:
        """How much of the source is there so far, from its beginning, as far as is known."""

    def prepare(self, size_bytes: int) -> int:
        """The process runs, and holds about so much that no backend over this one takes: begin to make room.

        Returns how much of it this one will take.
        """

    def wait_prepared(self) -> None:
        """Until what `prepare` began is done."""

    def begin(self, restore_thread: int, meter: Meter, deadline: float | None) -> None:
        """All of the gang are LOCKED. Above level 0: begin to take memory out of the process.

        At level 0: be ready for the driver's checkpoint.
        """

    def wait_begun(self) -> None:
        """Until the memory has left the process, copied or not (level 0: until the driver may begin)."""

    def complete(self, meter: Meter) -> None:
        """The driver has checkpointed all of the gang. After this the source is final."""

    def abort(self) -> None:
        """Something failed, before `complete` or after: stop, nobody wants the data.

        The process is as `begin` found it after `give_back`.
        """

    def give_back(self) -> None:
        """The process is LOCKED, the driver has restored it: whatever is away goes where it was. Idempotent.

        Level 0: nothing, the driver has done so. Raises GpucrError or OSError: then none of the gang runs.
        """


WaitForBytes = Callable[[int], int]
"""Waits until a destination is filled up to here, and returns how far it is filled then. May raise: give up."""


class Return(Protocol):
    """Brings a part of one process's device memory back into a process that CRIU has made."""

    @property
    def destination(self) -> Destination:
        """Where the snapshot's bytes go, from the beginning on."""

    @property
    def note(self) -> str | None:
        """What a user may want to know of how it is done."""

    def begin(self, pid: int, restore_thread: int, wait: WaitForBytes, *, stays: bool) -> None:
        """The process is CHECKPOINTED; the driver restores it next, unless it ``stays`` so.

        Above level 0: the driver has restored all of the gang, and each is LOCKED. Put the memory where it was.
        """

    def finish(self) -> None:
        """Level 0: the driver's restore has returned. All of the memory is where it was. Raises what `begin` may."""

    def close(self) -> None:
        """Free what held the data. Idempotent."""


class Kind(Protocol):
    """A kind of backend over the driver's. `kinds.register` makes dumps use it, and restores know it."""

    @property
    def name(self) -> str:
        """Small letters, digits and underscores: the manifest has it."""

    def backend_for(self, part: DevicePart, protection: Protection) -> Backend | None:
        """What takes memory of this process, which runs, at this level; None: there is none of this kind.

        It names its recovery actions to ``protection`` before it changes anything.
        """

    def missing(self) -> str | None:
        """What this machine lacks to bring memory of this kind back (None: nothing)."""

    def return_for(self, part: DevicePart, extents: Sequence[StagedExtent], size_bytes: int) -> Return:
        """What brings back so much. Raises Unsupported."""
