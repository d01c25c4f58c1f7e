"""The memory that an interposer carries, as bytes: read from descriptors, and written into new memory."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import itertools
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from gpucr.gpu_state.source import Gone
from gpucr.interposer.client import Held
from gpucr.interposer.digests import PieceDigests
from gpucr.interposer.protocol import ON_DEVICE, BadAnswer, Block, Flag
from gpucr.interposer.vault import SLOT_BYTES, Shown, Vault, VaultFailed, Vaults, in_parallel
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import DevicePart, StagedExtent

_PIECE_BYTES = 4 * SLOT_BYTES

_LOOK_BYTES = 256 << 20
"""Looked at by one launch beside a running program: 0.2 ms of an H100."""

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


class _Run(NamedTuple):
    """Neighbouring blocks of one GPU: where they begin in the source, and where the vault sees them."""

    start: int
    vault: Vault
    shown: Shown

    @property
    def end(self) -> int:
        return self.start + self.shown.size_bytes


class BlocksSource:
    """See `Source`: memory that descriptors keep alive, read from its GPUs.

    ``changes``: its process runs. Then every piece read is a copy that was made on the GPU at once, with its digest,
    and after `close` there is nothing to read any more (`Gone`).
    """

    def __init__(
        self, part: DevicePart, held: Sequence[Held], uuids: Sequence[str], vaults: Vaults, *, changes: bool = False
    ) -> None:
        self.part = part
        self.extents = extents_of([each.block for each in held], uuids)
        self.size_bytes = sum(extent.size_bytes for extent in self.extents)
        self._held = tuple(held)
        self._uuids = uuids
        self._vaults = vaults
        self._changes = changes
        self._runs: list[_Run] = []
        self._named: list[PieceDigests] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._unused = threading.Condition()
        self._users = 0

    def read_into(self, position: int, data: memoryview) -> bytes | None:
        """Through the vault of its GPU."""
        if self._changes:
            with self._used():
                return self._read_changing(position, data)
        for run, address, at, size in self._pieces(position, len(data)):
            run.vault.read_into(address, data[at : at + size])
        return None

    def _read_changing(self, position: int, data: memoryview) -> bytes | None:
        pieces = list(self._pieces(position, len(data)))
        run, address, _, size = pieces[0]
        if size == len(data) and self._named:
            return self._named[self._runs.index(run)].read_into(address, data)
        for run, address, at, size in pieces:
            run.vault.read_into(address, data[at : at + size])
        return None

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """`close` waits for the end of the block. Raises Gone after it, and for a failure beside a running process."""
        with self._unused:
            if self._is_closed and self._changes:
                raise Gone
            self._users += 1
        try:
            yield
        except VaultFailed as e:
            if self._changes:
                raise Gone from e
            raise
        finally:
            with self._unused:
                self._users -= 1
                self._unused.notify_all()

    def digests(
        self, piece_bytes: int, key: bytes | None, rest: Callable[[float], None] = lambda _: None
    ) -> list[bytes | None]:
        """The digests of its pieces, computed on their GPUs; None: of a piece that lies on several, or in two ranges.

        ``rest`` gets the seconds of each part of the work, and may wait. One caller at a time.

        Raises VaultFailed, Gone.
        """
        found: list[bytes | None] = [None] * -(-self.size_bytes // piece_bytes)
        with self._used():
            looked_at = list(zip(self.see_all(), self._named_by(piece_bytes, key), strict=True))
        for run, named in looked_at:
            first, last = -(-run.start // piece_bytes), run.end // piece_bytes
            end = self.size_bytes if run.end == self.size_bytes else last * piece_bytes
            step = max(1, (_LOOK_BYTES if self._changes else self.size_bytes) // piece_bytes) * piece_bytes
            for start in range(first * piece_bytes, end, step):
                begin = time.monotonic()
                number = start // piece_bytes
                with self._used():
                    digests = named.of(run.shown.address + start - run.start, min(step, end - start))
                found[number : number + len(digests)] = digests
                rest(time.monotonic() - begin)
        return found

    def _named_by(self, piece_bytes: int, key: bytes | None) -> list[PieceDigests]:
        if not self._named:
            lengths = {min(piece_bytes, self.size_bytes), self.size_bytes % piece_bytes or piece_bytes}
            by_vault = {id(run.vault): run.vault for run in self._runs}
            made = {each: PieceDigests(vault, piece_bytes, key, lengths) for each, vault in by_vault.items()}
            self._named = [made[id(run.vault)] for run in self._runs]
        return self._named

    def copy_to(self, address: int) -> None:
        """Copy everything to host memory from this address on."""
        pieces = [
            (extent.offset + at, min(_PIECE_BYTES, extent.size_bytes - at))
            for extent in self.extents
            for at in range(0, extent.size_bytes, _PIECE_BYTES)
        ]
        self.copy_these(pieces, address)

    def copy_these(self, ranges: Sequence[tuple[int, int]], address: int) -> None:
        """Copy these, each by its start and size, to their places in host memory from this address on."""
        in_parallel([functools.partial(self.copy_some, start, size, address + start) for start, size in ranges])

    def copy_some(self, position: int, size_bytes: int, to: int) -> None:
        """Copy a range to this address in host memory."""
        for run, address, at, size in self._pieces(position, size_bytes):
            run.vault.read(address, size, _copy_to(to + at))

    def on_one_gpu(self, position: int, size_bytes: int) -> tuple[Vault, int] | None:
        """The vault that sees this range, and where it sees it; None: it is in several."""
        run, address, _, size = next(self._pieces(position, size_bytes))
        return (run.vault, address) if size == size_bytes else None

    def _pieces(self, position: int, size_bytes: int) -> Iterator[tuple[_Run, int, int, int]]:
        """What of each run lies in a range: the run, where its vault sees it, where in the range, how much."""
        runs = self.see_all()
        number, done = bisect.bisect_right([run.start for run in runs], position) - 1, 0
        while done < size_bytes:
            run = runs[number]
            within = position + done - run.start
            size = min(size_bytes - done, run.shown.size_bytes - within)
            yield run, run.shown.address + within, done, size
            done, number = done + size, number + 1

    def see_all(self) -> list[_Run]:
        """Map all of it. After this the descriptors may be closed. Raises VaultFailed."""
        with self._lock:
            if not self._runs:
                self._is_closed = False
                self._map()
            return self._runs

    def _place_of(self, held: Held) -> tuple[Vault, bool]:
        return vault_of(self._vaults, held.block, self._uuids), held.block.location_type == ON_DEVICE

    def _map(self) -> None:
        start = 0
        for (vault, _), group in itertools.groupby(self._held, self._place_of):
            shown = vault.see_all([(each.descriptor, each.block.size_bytes) for each in group])
            self._runs.append(_Run(start, vault, shown))
            start += shown.size_bytes

    def close(self) -> None:
        """Unmap it, when nobody reads it any more."""
        with self._unused:
            self._is_closed = True
            self._unused.wait_for(lambda: not self._users)
        with self._lock:
            for named in self._named:
                named.close()
            self._named = []
            while self._runs:
                run = self._runs.pop()
                run.vault.forget(run.shown)


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
        del self._start
        self._map.close()
