"""Canaries of one process."""

from __future__ import annotations

import ctypes
import mmap

from gpucr.diagnosis.canaries.programs.cuda import Cuda, Impossible
from gpucr.diagnosis.canaries.programs.data import (
    DATA_BYTES,
    NUMBER_BYTES,
    Wrong,
    expect_number,
    expect_pattern,
    pattern,
)

_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL


class Plain:
    """Device memory and a kernel: what every CUDA program has."""

    def __init__(self) -> None:
        self.cuda = Cuda()
        self.cuda.context(0)
        self._increment = self.cuda.increment()
        self._data = self.cuda.allocate(DATA_BYTES)
        self._number = self.cuda.allocate(NUMBER_BYTES)
        self.cuda.write(self._data, pattern(1))
        self.cuda.write(self._number, bytes(NUMBER_BYTES))
        self._count = 0

    def check(self) -> None:
        """The data is intact, and a kernel keeps counting."""
        expect_pattern(self.cuda.read(self._data, DATA_BYTES), 1, "device memory")
        self.count()

    def count(self) -> None:
        """One more launch."""
        self.cuda.launch(self._increment, self._number)
        self.cuda.synchronize()
        self._count += 1
        expect_number(self.cuda.read(self._number, NUMBER_BYTES), self._count, "device memory")


class StreamsAndGraphs:
    """Two streams, and a graph that was captured and instantiated once and is launched again and again."""

    LAUNCHES_A_GRAPH = 3

    def __init__(self) -> None:
        self.cuda = Cuda()
        self.cuda.context(0)
        self._increment = self.cuda.increment()
        self._number = self.cuda.allocate(NUMBER_BYTES)
        self.cuda.write(self._number, bytes(NUMBER_BYTES))
        self._streams = (self.cuda.stream(), self.cuda.stream())
        self._graph = self._capture()
        self._count = 0

    def _capture(self) -> ctypes.c_void_p:
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        stream = self._streams[0]
        self.cuda("cuStreamBeginCapture_v2", stream, _CAPTURE_RELAXED)
        for _ in range(self.LAUNCHES_A_GRAPH):
            self.cuda.launch(self._increment, self._number, stream)
        self.cuda("cuStreamEndCapture", stream, ctypes.byref(graph))
        self.cuda("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        self.cuda("cuGraphDestroy", graph)
        return executable

    def check(self) -> None:
        """The graph runs as often as it is launched, and so does a kernel on each stream."""
        for stream in self._streams:
            self.cuda("cuGraphLaunch", self._graph, stream)
            self.cuda.launch(self._increment, self._number, stream)
            self.cuda.synchronize(stream)
            self._count += self.LAUNCHES_A_GRAPH + 1
        expect_number(self.cuda.read(self._number, NUMBER_BYTES), self._count, "device memory")


class Pinned:
    """Host memory that the GPU reads and writes: the driver's (cuMemHostAlloc) and the program's own, registered."""

    def __init__(self) -> None:
        self.cuda = Cuda()
        self.cuda.context(0)
        self._increment = self.cuda.increment()
        self._stream = self.cuda.stream()
        self._own = mmap.mmap(-1, DATA_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        own = ctypes.addressof(ctypes.c_char.from_buffer(self._own))
        self.cuda("cuMemHostRegister_v2", ctypes.c_void_p(own), ctypes.c_size_t(DATA_BYTES), 0)
        allocated = ctypes.c_void_p()
        self.cuda("cuMemHostAlloc", ctypes.byref(allocated), ctypes.c_size_t(DATA_BYTES), 0)
        self._places = {"registered memory": own, "memory of cuMemHostAlloc": int(allocated.value or 0)}
        self._device = self.cuda.allocate(DATA_BYTES)
        for address in self._places.values():
            ctypes.memmove(address, bytes(NUMBER_BYTES) + pattern(2)[NUMBER_BYTES:], DATA_BYTES)
        self._count = 0

    def check(self) -> None:
        """The GPU still counts in it, and copies from it arrive."""
        self._count += 1
        for where, address in self._places.items():
            pointer = ctypes.c_uint64()
            self.cuda("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), ctypes.c_void_p(address), 0)
            self.cuda.launch(self._increment, pointer.value, self._stream)
            device, size = ctypes.c_uint64(self._device), ctypes.c_size_t(DATA_BYTES)
            self.cuda("cuMemcpyHtoDAsync_v2", device, ctypes.c_void_p(address), size, self._stream)
            self.cuda.synchronize(self._stream)
            expect_number(ctypes.string_at(address, NUMBER_BYTES), self._count, where)
            arrived = self.cuda.read(self._device, DATA_BYTES)
            expect_number(arrived[:NUMBER_BYTES], self._count, f"the copy of {where}")
            if arrived[NUMBER_BYTES:] != pattern(2)[NUMBER_BYTES:]:
                raise Wrong(f"{where} does not hold what was written before the checkpoint")


class Managed:
    """A small amount of managed memory (cuMemAllocManaged)."""

    def __init__(self) -> None:
        self._plain = Plain()
        pointer = ctypes.c_uint64()
        self._plain.cuda("cuMemAllocManaged", ctypes.byref(pointer), ctypes.c_size_t(DATA_BYTES), _ATTACH_GLOBAL)
        self._pointer = pointer.value
        self._plain.cuda.write(self._pointer, pattern(3))

    def check(self) -> None:
        """The managed memory and everything else is intact."""
        expect_pattern(self._plain.cuda.read(self._pointer, DATA_BYTES), 3, "managed memory")
        self._plain.check()


class PeerAccess:
    """Two GPUs of one process that may read each other's memory, and a copy between them."""

    def __init__(self) -> None:
        self.cuda = Cuda()
        if self.cuda.device_count() < 2:
            raise Impossible("needs 2 GPUs")
        can = ctypes.c_int()
        self.cuda("cuDeviceCanAccessPeer", ctypes.byref(can), 0, 1)
        if not can.value:
            raise Impossible("needs GPUs that can reach each other's memory")
        self._contexts, self._pointers = [], []
        for ordinal in (0, 1):
            self._contexts.append(self.cuda.context(ordinal))
            self._pointers.append(self.cuda.allocate(DATA_BYTES))
        for here, there in ((0, 1), (1, 0)):
            self.cuda("cuCtxSetCurrent", self._contexts[here])
            self.cuda("cuCtxEnablePeerAccess", self._contexts[there], 0)
        self._round = 0
        self._copy(0)

    def _copy(self, source: int) -> None:
        """New data from one GPU to the other, without the host in between."""
        self._round += 1
        self.cuda("cuCtxSetCurrent", self._contexts[source])
        self.cuda.write(self._pointers[source], pattern(self._round))
        target = 1 - source
        self.cuda(
            "cuMemcpyPeer",
            ctypes.c_uint64(self._pointers[target]),
            self._contexts[target],
            ctypes.c_uint64(self._pointers[source]),
            self._contexts[source],
            ctypes.c_size_t(DATA_BYTES),
        )
        self.cuda.synchronize()

    def check(self) -> None:
        """Both GPUs hold what the last copy left, and a copy the other way arrives."""
        for source in (1, 0):
            for pointer, context in zip(self._pointers, self._contexts, strict=True):
                self.cuda("cuCtxSetCurrent", context)
                expect_pattern(self.cuda.read(pointer, DATA_BYTES), self._round, "memory of one of the two GPUs")
            self._copy(source)
