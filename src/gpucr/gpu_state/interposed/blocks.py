"""The memory that an interposer carries, as bytes: read from descriptors, and written into new memory."""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from gpucr.interposer.client import Held
from gpucr.interposer.protocol import ON_DEVICE, BadAnswer, Block, Flag
from gpucr.interposer.vault import SLOT_BYTES, Shown, Vault, Vaults, in_parallel
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import DevicePart, StagedExtent

_PIECE_BYTES = 4 * SLOT_BYTES


_UNMAPPED = 1 << 62
"""Snapshots number memory without an address in the process from here."""


def can_leave(block: Block) -> bool:
    """Whether an interposer carries it; others are not moved."""
    return not block.flags & (Flag.IMPORTED | Flag.CANNOT_LEAVE)


def gpu_of(block: Block, uuids: Sequence[str]) -> str | None:
    """The GPU that it is on; None: host memory. ``uuids``: the GPUs that the process sees, in its order.

    Raises BadAnswer for a GPU that it does not see.
    """
    if block.location_type != ON_DEVICE:
        return None
    if not 0 <= block.location < len(uuids):
        raise BadAnswer(f"the agent has memory on GPU {block.location} of {len(uuids)}")
    return uuids[block.location]


def vault_of(vaults: Vaults, block: Block, uuids: Sequence[str]) -> Vault:
    """The vault that accesses it: for host memory, any. Raises as `Vaults.of`."""
    return vaults.of(gpu_of(block, uuids) or uuids[0])


def extents_of(blocks: Sequence[Block], uuids: Sequence[str]) -> tuple[StagedExtent, ...]:
    """One for each block, consecutive; a block without an address is numbered."""
    extents: list[StagedExtent] = []
    offset = 0
    for block in blocks:
        address = block.address or _UNMAPPED + offset
        extents.append(StagedExtent(address, block.size_bytes, offset, gpu_of(block, uuids)))
        offset += block.size_bytes
    return tuple(extents)


def _copy_to(start: int) -> Callable[[int, int, int], object]:
    """What takes pieces of `Vault.read` to host memory from this address on."""
    return lambda slot, offset, size_bytes: ctypes.memmove(start + offset, slot, size_bytes)


class BlocksSource:
    """See `Source`: memory that descriptors keep alive, read from its GPUs."""

    def __init__(self, part: DevicePart, held: Sequence[Held], uuids: Sequence[str], vaults: Vaults) -> None:
        self.part = part
        self.extents = extents_of([each.block for each in held], uuids)
        self.size_bytes = sum(extent.size_bytes for extent in self.extents)
        self._held = tuple(held)
        self._uuids = uuids
        self._vaults = vaults
        self._seen: dict[int, tuple[Vault, Shown]] = {}
        self._lock = threading.Lock()

    def read_into(self, position: int, data: memoryview) -> None:
        """Through the vault of its GPU."""
        for vault, address, at, size in self._pieces(position, len(data)):
            vault.read_into(address, data[at : at + size])

    def copy_to(self, address: int) -> None:
        """Copy everything to host memory from this address on."""
        pieces = [
            (extent.offset + at, min(_PIECE_BYTES, extent.size_bytes - at))
            for extent in self.extents
            for at in range(0, extent.size_bytes, _PIECE_BYTES)
        ]
        in_parallel([functools.partial(self._copy, start, size, address + start) for start, size in pieces])

    def _copy(self, position: int, size_bytes: int, to: int) -> None:
        for vault, address, at, size in self._pieces(position, size_bytes):
            vault.read(address, size, _copy_to(to + at))

    def _pieces(self, position: int, size_bytes: int) -> Iterator[tuple[Vault, int, int, int]]:
        """What of each block lies in a range: its vault, where it sees it, where in the range, how much."""
        number, done = bisect.bisect_right(self._offsets, position) - 1, 0
        while done < size_bytes:
            extent = self.extents[number]
            within = position + done - extent.offset
            size = min(size_bytes - done, extent.size_bytes - within)
            vault, shown = self._see(number)
            yield vault, shown.address + within, done, size
            done, number = done + size, number + 1

    @functools.cached_property
    def _offsets(self) -> list[int]:
        return [extent.offset for extent in self.extents]

    def _see(self, number: int) -> tuple[Vault, Shown]:
        with self._lock:
            if number not in self._seen:
                held = self._held[number]
                vault = vault_of(self._vaults, held.block, self._uuids)
                self._seen[number] = vault, vault.see(held.descriptor, held.block.size_bytes)
            return self._seen[number]

    def see_all(self) -> None:
        """After this the descriptors may be closed. Raises VaultFailed."""
        for number in range(len(self._held)):
            self._see(number)

    def close(self) -> None:
        """Unmap it."""
        with self._lock:
            while self._seen:
                vault, shown = self._seen.popitem()[1]
                vault.forget(shown)


def held_of(blocks: Iterable[Sequence[int]], descriptors: Iterator[int]) -> list[Held]:
    """The inverse of a block's fields, each with its descriptor."""
    return [
        Held(Block(index, generation, size, kind, location, Flag(flags), *rest), next(descriptors))
        for index, generation, size, kind, location, flags, *rest in blocks
    ]


def writes(vault: Vault, shown: Shown, start: int) -> list[Callable[[], None]]:
    """Copies that fill device memory from the host address, in pieces."""

    def one(at: int) -> None:
        size = min(_PIECE_BYTES, shown.size_bytes - at)
        vault.write(shown.address + at, size, lambda slot, offset, n: ctypes.memmove(slot, start + at + offset, n))

    return [functools.partial(one, at) for at in range(0, shown.size_bytes, _PIECE_BYTES)]


class HostRoom:
    """A memory file mapped into this process. The caller keeps the file."""

    def __init__(self, file: StagingFile, size_bytes: int) -> None:
        self._map = mmap.mmap(file.fd, size_bytes)
        self._start = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._start)

    def close(self) -> None:
        """Unmap it."""
        del self._start
        self._map.close()
