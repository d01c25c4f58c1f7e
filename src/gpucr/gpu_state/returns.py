"""Brings back a snapshot's device memory of any kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from gpucr.gang import Gang
from gpucr.gpu_state import kinds
from gpucr.gpu_state.backend import CUSTOM_STORAGE, INTERPOSED, Return, WaitForBytes
from gpucr.gpu_state.captured import CapturedReturn
from gpucr.gpu_state.custom_storage.returns import StorageReturns
from gpucr.gpu_state.interposed.host_copy import HostCopyReturn
from gpucr.gpu_state.interposed.restored import RestoredBlocks
from gpucr.gpu_state.placement import Placement
from gpucr.gpu_state.room import ROOM_LIMIT_S, lacking, wait_for_room
from gpucr.interposer.digests import DIGESTS_BYTES
from gpucr.interposer.sharing import Share
from gpucr.linux.tmpfs import KEPT_NAME
from gpucr.model import DevicePart, StagedExtent


class StoredPart(Protocol):
    """A part, as in the manifest (`snapshot.manifest.DeviceData`)."""

    @property
    def kind(self) -> str:
        """The kind of backend that held it."""

    @property
    def extents(self) -> Sequence[StagedExtent]:
        """Where its bytes were in the process, with their offsets in what is stored."""

    @property
    def size_bytes(self) -> int:
        """How much device memory is stored, in bytes."""


class Returns:
    """The returns of a restore: for processes that come back as members of this gang, on their chosen GPUs."""

    def __init__(self, gang: Gang, placement: Placement) -> None:
        self._interposed = RestoredBlocks(gang.driver, placement.new_uuid)
        self._custom = StorageReturns(placement.new_uuid, lambda pid: placement.maps(gang.members).get(pid))

    def return_for(self, part: DevicePart, data: StoredPart, *, stays: bool) -> Return:
        """For what one backend held (`kinds.require_kinds` has passed). ``stays``: the process stays CHECKPOINTED.

        Raises Unsupported, VaultFailed.
        """
        if data.kind == INTERPOSED and stays:
            return HostCopyReturn(part, data.extents, data.size_bytes)
        if data.kind == INTERPOSED:
            return self._interposed.return_for(part, data.extents)
        if data.kind == CUSTOM_STORAGE and stays:
            return CapturedReturn(part, data.extents, data.size_bytes, KEPT_NAME)
        if data.kind == CUSTOM_STORAGE:
            return self._custom.return_for(part, data.extents, data.size_bytes)
        return kinds.return_for(part, data.kind, data.extents, data.size_bytes)

    def make_way(self, needed_bytes: Mapping[str, int], wait_for: Callable[[DevicePart], WaitForBytes]) -> None:
        """The driver is about to restore what needs this much room, in bytes by GPU UUID:

        make it, if there is too little.

        ``wait_for``: see `Return.begin`. Raises GpuFull if others have taken it.
        """
        self._interposed.wait_made()  # on a busy machine its part may come later: it needs room as well
        still_taken = DIGESTS_BYTES if self._interposed.is_filling else 0  # what is written is compared on the GPU
        if lacking({uuid: size_bytes + still_taken for uuid, size_bytes in needed_bytes.items()}):
            self._interposed.make_way(wait_for)
            wait_for_room(needed_bytes, ROOM_LIMIT_S)

    def go_on(self, pids: Mapping[int, int], shares: Sequence[Share]) -> None:
        """All have their own memory: let the interposers do their part. See `RestoredBlocks.go_on`."""
        self._interposed.go_on(pids, shares)

    def give_up(self) -> None:
        """Wake readers: the destination will not come."""
        self._custom.give_up()

    def close(self) -> None:
        self._interposed.close()
        self._custom.close()
