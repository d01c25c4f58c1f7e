"""Carry device memory of other processes to the host and back, with a CUDA context of our own and a pinned ring.

Each worker has one slot of the ring and a stream: device to slot, slot to where it belongs, the next piece. With enough
workers the bus is always busy, and what is pinned stays small whatever the size of the job.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from msgspec import Struct

from gpucr.interposer.client import Held
from gpucr.linux import libc

SLOT_BYTES = 32 << 20
WORKERS = 12
_HUGE_PAGE_BYTES = 2 << 20
_POPULATE_THREADS = 16
_MADV_POPULATE_WRITE = 23
_READ_WRITE, _ON_DEVICE, _POSIX_DESCRIPTOR, _NON_BLOCKING = 3, 1, 1, 1

_POINTER, _SIZE, _LONG = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64

_madvise = libc.function("madvise", _POINTER, _SIZE, ctypes.c_int)  # the mmap module's holds the GIL


class VaultFailed(Exception):
    """A call of the driver failed in the vault's own process; what it holds is unchanged."""


class _Access(ctypes.Structure):
    _fields_ = (("location_type", ctypes.c_int), ("location", ctypes.c_int), ("flags", ctypes.c_int))


class _Piece(Struct, frozen=True):
    device: int  # address
    offset: int  # in the room
    size: int


class _Library:
    """libcuda with argument types, and errors for results."""

    _TYPES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "cuInit": (ctypes.c_uint,),
        "cuDevicePrimaryCtxRetain": (_POINTER, ctypes.c_int),
        "cuCtxSetCurrent": (_POINTER,),
        "cuStreamCreate": (_POINTER, ctypes.c_uint),
        "cuStreamSynchronize": (_POINTER,),
        "cuMemHostAlloc": (_POINTER, _SIZE, ctypes.c_uint),
        "cuMemFreeHost": (_POINTER,),
        "cuMemcpyDtoHAsync_v2": (_POINTER, _LONG, _SIZE, _POINTER),
        "cuMemcpyHtoDAsync_v2": (_LONG, _POINTER, _SIZE, _POINTER),
        "cuMemImportFromShareableHandle": (_POINTER, _POINTER, ctypes.c_int),
        "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _LONG, ctypes.c_ulonglong),
        "cuMemAddressFree": (_LONG, _SIZE),
        "cuMemMap": (_LONG, _SIZE, _SIZE, _LONG, ctypes.c_ulonglong),
        "cuMemUnmap": (_LONG, _SIZE),
        "cuMemSetAccess": (_LONG, _SIZE, _POINTER, _SIZE),
        "cuMemRelease": (_LONG,),
    }

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        for name, types in self._TYPES.items():
            getattr(self._library, name).argtypes = types

    def __call__(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise VaultFailed(f"{name} gave {result}")


class Vault:
    """For one GPU. Not for several threads at once."""

    def __init__(self, ordinal: int) -> None:
        """Start a context (0.3 s, 530 MiB of device memory) and pin the ring. Raises OSError, VaultFailed."""
        self._cuda, self._ordinal = _Library(), ordinal
        self._context = _POINTER()
        self._cuda("cuInit", 0)
        self._cuda("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), ordinal)
        self._cuda("cuCtxSetCurrent", self._context)
        self._slots: list[tuple[int, ctypes.c_void_p]] = []  # where the slot is, its stream
        for _ in range(WORKERS):
            slot, stream = _POINTER(), _POINTER()
            self._cuda("cuMemHostAlloc", ctypes.byref(slot), SLOT_BYTES, 0)
            self._cuda("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
            self._slots.append((slot.value or 0, stream))
        self._map: mmap.mmap | None = None
        self._room = self._room_bytes = 0
        self._saved: dict[tuple[int, int], int] = {}

    def make_room(self, size: int) -> None:
        """Host memory in huge pages, populated: best while the job runs. Raises OSError where there is too little."""
        size = -(-size // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self._map = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._room = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self._room_bytes = size
        first = self._room - start
        self._map.madvise(mmap.MADV_HUGEPAGE)
        part = -(-size // _POPULATE_THREADS // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        parts = [(first + at, min(part, size - at)) for at in range(0, size, part)]
        _in_parallel([functools.partial(self._populate, at, length) for at, length in parts])

    def _populate(self, offset: int, length: int) -> None:
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))  # type: ignore[arg-type]
        libc.check(_madvise(start + offset, length, _MADV_POPULATE_WRITE), "madvise")

    def save(self, held: Sequence[Held]) -> None:
        """Copy to the room. Raises VaultFailed; ValueError where the room is too small."""
        if sum(each.block.size_bytes for each in held) > self._room_bytes:
            raise ValueError("the room is smaller than the memory")
        self._saved = {}
        offset = 0
        for each in held:
            self._saved[each.block.index, each.block.generation] = offset
            offset += each.block.size_bytes
        self._carry(held, self._down)

    def load(self, made: Sequence[Held]) -> None:
        """Copy what was saved of the same blocks into them, and close their descriptors. Raises VaultFailed."""
        self._carry(made, self._up)
        self.let_go(made)

    def let_go(self, held: Sequence[Held]) -> None:
        """Close the descriptors: where nobody else has the memory it is gone."""
        for each in held:
            each.close()

    def _carry(self, held: Sequence[Held], copy: Callable[[_Piece, int, ctypes.c_void_p], None]) -> None:
        mapped: list[tuple[int, int, int]] = []  # address, size, handle
        self._cuda("cuCtxSetCurrent", self._context)
        try:
            pieces: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
            for each in held:
                offset = self._saved[each.block.index, each.block.generation]
                address = self._see(each, mapped)
                for at in range(0, each.block.size_bytes, SLOT_BYTES):
                    size = min(SLOT_BYTES, each.block.size_bytes - at)
                    pieces.put(_Piece(address + at, offset + at, size))
            _in_parallel([functools.partial(self._work, pieces, slot, copy) for slot in self._slots])
        finally:
            for address, size, handle in mapped:
                self._cuda("cuMemUnmap", address, size)
                self._cuda("cuMemRelease", handle)
                self._cuda("cuMemAddressFree", address, size)

    def _see(self, held: Held, mapped: list[tuple[int, int, int]]) -> int:
        """The address at which the block shows in this process."""
        handle, address, size = _LONG(), _LONG(), held.block.size_bytes
        access = _Access(_ON_DEVICE, self._ordinal, _READ_WRITE)
        self._cuda("cuMemImportFromShareableHandle", ctypes.byref(handle), held.descriptor, _POSIX_DESCRIPTOR)
        self._cuda("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        self._cuda("cuMemMap", address, size, 0, handle, 0)
        mapped.append((address.value, size, handle.value))
        self._cuda("cuMemSetAccess", address, size, ctypes.byref(access), 1)
        return address.value

    def _work(
        self,
        pieces: queue.SimpleQueue[_Piece],
        slot: tuple[int, ctypes.c_void_p],
        copy: Callable[[_Piece, int, ctypes.c_void_p], None],
    ) -> None:
        self._cuda("cuCtxSetCurrent", self._context)
        while True:
            try:
                piece = pieces.get_nowait()
            except queue.Empty:
                return
            copy(piece, *slot)

    def _down(self, piece: _Piece, slot: int, stream: ctypes.c_void_p) -> None:
        self._cuda("cuMemcpyDtoHAsync_v2", slot, piece.device, piece.size, stream)
        self._cuda("cuStreamSynchronize", stream)
        ctypes.memmove(self._room + piece.offset, slot, piece.size)

    def _up(self, piece: _Piece, slot: int, stream: ctypes.c_void_p) -> None:
        ctypes.memmove(slot, self._room + piece.offset, piece.size)
        self._cuda("cuMemcpyHtoDAsync_v2", piece.device, slot, piece.size, stream)
        self._cuda("cuStreamSynchronize", stream)


def _in_parallel(calls: Sequence[Callable[[], None]]) -> None:
    """All of them, each in its own thread; the first error is raised when all have ended."""
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as e:  # noqa: BLE001 (raised below, in the caller's thread)
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
