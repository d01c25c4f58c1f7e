"""Canaries of two processes that share memory: the first one makes it, the second one opens it.

The two are forked before either of them uses CUDA, with a socket between them. The first one leads: it tells the second
when to check, and passes on the result.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import tempfile
from abc import ABC, abstractmethod

from gpucr.diagnosis.canaries.programs.cuda import (
    Cuda,
    CudaFailed,
    Impossible,
    IpcHandle,
    MemoryAccess,
    MemoryProperties,
)
from gpucr.diagnosis.canaries.programs.data import DATA_BYTES, NUMBER_BYTES, Wrong, expect_number, pattern

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_BETWEEN_PROCESSES = 0x2 | 0x4  # CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS
_PINNED, _ON_DEVICE, _POSIX_DESCRIPTOR, _READ_WRITE = 1, 1, 1, 3  # CUmemAllocationType and the like
_MESSAGE_BYTES = 4096
_NOT_SUPPORTED = 801
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where NCCL has its shared memory


def end_with_parent() -> None:
    """Have this process killed when its parent ends in any way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Link:
    """Messages between the two processes: one at a time, each answered."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, text: str, data: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """One message."""
        socket.send_fds(self._end, [text.encode() + b"\0" + data], list(fds))

    def receive(self) -> tuple[str, bytes, list[int]]:
        """Text, data and descriptors. Raises Wrong if the other one has ended."""
        message, fds, _, _ = socket.recv_fds(self._end, _MESSAGE_BYTES, 1)
        if not message:
            raise Wrong("the other process has ended")
        text, _, data = message.partition(b"\0")
        return text.decode(), data, fds

    def require(self, text: str) -> bytes:
        """The data of an expected message. Raises if the other process sent something else."""
        found, data, _ = self.receive()
        if found == "impossible":
            raise Impossible(data.decode())
        if found != text:
            raise Wrong(f"the other process: {data.decode()}")
        return data


class Pair(ABC):
    """Two processes around one piece of memory."""

    def __init__(self) -> None:
        self._before_fork()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            self._follow(_Link(theirs))
        theirs.close()
        self.link = _Link(ours)
        self.count = 0
        self._begin(0)
        self._offer()
        self.link.require("ready")

    def _begin(self, rank: int) -> None:
        """CUDA in this process; rank 1 has the second GPU where there is one that may be used."""
        self.cuda = Cuda()
        self.cuda.context(self._device_of(rank))
        self.increment = self.cuda.increment()

    def _device_of(self, rank: int) -> int:
        """Both on the first GPU: sharing across two is also peer access, which has its own canary."""
        return 0

    def _follow(self, link: _Link) -> None:
        """The second process, to its end."""
        end_with_parent()
        self.link = link
        self.count = 0
        try:
            self._begin(1)
            self._accept()
            link.send("ready")
            while True:
                link.require("check")
                self._check_second()
                link.send("right")
        except Impossible as e:
            self._last_words("impossible", str(e))
        except Exception as e:  # noqa: BLE001 - any error must reach the first process
            self._last_words("wrong", f"{type(e).__name__}: {e}")
        os._exit(1)

    def _last_words(self, text: str, reason: str) -> None:
        with contextlib.suppress(OSError):
            self.link.send(text, reason.encode()[: _MESSAGE_BYTES - 100])

    def check(self) -> None:
        """Memory that both processes see."""
        self._check_first()
        self.link.send("check")
        self.link.require("right")
        self._check_first_again()

    def _before_fork(self) -> None:  # noqa: B027 - most need nothing
        """Set up what both need, while they are still one process without CUDA."""

    @abstractmethod
    def _offer(self) -> None:
        """In the first process: make the memory, fill it, and tell the second one."""

    @abstractmethod
    def _accept(self) -> None:
        """In the second process: open it."""

    @abstractmethod
    def _check_first(self) -> None:
        """In the first process."""

    @abstractmethod
    def _check_second(self) -> None:
        """In the second process."""

    @abstractmethod
    def _check_first_again(self) -> None:
        """In the first process, after the second one."""


class _SharedDeviceMemory(Pair):
    """Device memory of the first process that is in the second one's address space: a number, followed by a pattern."""

    pointer: int
    size_bytes = DATA_BYTES

    def _fill(self) -> None:
        self.cuda.write(self.pointer, bytes(NUMBER_BYTES) + pattern(4, self.size_bytes)[NUMBER_BYTES:])

    def _look(self) -> None:
        """The number is what both have counted, the rest is as written."""
        found = self.cuda.read(self.pointer, self.size_bytes)
        expect_number(found[:NUMBER_BYTES], self.count, "the shared device memory")
        if found[NUMBER_BYTES:] != pattern(4, self.size_bytes)[NUMBER_BYTES:]:
            raise Wrong("the shared device memory does not hold what was written before the checkpoint")

    def _add(self) -> None:
        self.cuda.launch(self.increment, self.pointer)
        self.cuda.synchronize()
        self.count += 1

    def _check_first(self) -> None:
        self._look()
        self._add()

    def _check_second(self) -> None:
        self.count += 1  # the first one's
        self._look()
        self._add()

    def _check_first_again(self) -> None:
        self.count += 1  # the second one's
        self._look()


class LegacyIpc(_SharedDeviceMemory):
    """cuIpcGetMemHandle and cuIpcOpenMemHandle, as NCCL with NCCL_CUMEM_ENABLE=0 and torch between processes.

    As torch does it, with an event of the first process that tells the second one when the memory is ready.
    """

    def __init__(self) -> None:
        self._event = ctypes.c_void_p()
        super().__init__()

    def _offer(self) -> None:
        self.pointer = self.cuda.allocate(self.size_bytes)
        self._fill()
        handle = IpcHandle()
        try:
            self.cuda("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.pointer))
        except CudaFailed as e:
            if e.result == _NOT_SUPPORTED:
                raise Impossible("this GPU or driver has no legacy CUDA IPC") from e
            raise
        self.link.send("handle", bytes(handle))
        self.cuda("cuEventCreate", ctypes.byref(self._event), _BETWEEN_PROCESSES)
        event = IpcHandle()
        self.cuda("cuIpcGetEventHandle", ctypes.byref(event), self._event)
        self.link.send("event", bytes(event))

    def _accept(self) -> None:
        handle = IpcHandle.from_buffer_copy(self.link.require("handle"))
        pointer = ctypes.c_uint64()
        self.cuda("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, _LAZY_PEER_ACCESS)
        self.pointer = pointer.value
        event = IpcHandle.from_buffer_copy(self.link.require("event"))
        self.cuda("cuIpcOpenEventHandle", ctypes.byref(self._event), event)

    def _check_first(self) -> None:
        super()._check_first()
        self.cuda("cuEventRecord", self._event, None)

    def _check_second(self) -> None:
        self.cuda("cuEventSynchronize", self._event)
        super()._check_second()


class VmmExport(_SharedDeviceMemory):
    """Memory of cuMemCreate that is exported as a descriptor and mapped by another process: NCCL's default."""

    def _offer(self) -> None:
        properties = MemoryProperties(_PINNED, _POSIX_DESCRIPTOR, _ON_DEVICE, 0)
        granularity, handle, exported = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_int(-1)
        self.cuda("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), 0)
        self.size_bytes = max(granularity.value, DATA_BYTES)
        try:
            self.cuda(
                "cuMemCreate",
                ctypes.byref(handle),
                ctypes.c_size_t(self.size_bytes),
                ctypes.byref(properties),
                ctypes.c_ulonglong(0),
            )
            self.cuda(
                "cuMemExportToShareableHandle",
                ctypes.byref(exported),
                handle,
                _POSIX_DESCRIPTOR,
                ctypes.c_ulonglong(0),
            )
        except CudaFailed as e:
            if e.result == _NOT_SUPPORTED:
                raise Impossible("this GPU or driver exports no memory") from e
            raise
        self._map(handle)
        self._fill()
        self.link.send("descriptor", str(self.size_bytes).encode(), (exported.value,))
        os.close(exported.value)

    def _accept(self) -> None:
        text, data, fds = self.link.receive()
        if text != "descriptor" or len(fds) != 1:
            raise Wrong(f"no descriptor came, but {text}")
        self.size_bytes = int(data)
        handle = ctypes.c_uint64()
        self.cuda("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fds[0]), _POSIX_DESCRIPTOR)
        os.close(fds[0])
        self._map(handle)

    def _map(self, handle: ctypes.c_uint64) -> None:
        address, size, nothing = ctypes.c_uint64(), ctypes.c_size_t(self.size_bytes), ctypes.c_ulonglong(0)
        zero = ctypes.c_size_t(0)
        self.cuda("cuMemAddressReserve", ctypes.byref(address), size, zero, ctypes.c_uint64(0), nothing)
        self.cuda("cuMemMap", address, size, zero, handle, nothing)
        access = MemoryAccess(_ON_DEVICE, 0, _READ_WRITE)
        self.cuda("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        self.pointer = address.value


class SharedMemoryRanks(Pair):
    """Host memory in /dev/shm that both processes have mapped and registered: NCCL's shared-memory transport.

    Each GPU counts in its own half of the file and reads the other half, as ranks do with their neighbours' buffers.
    """

    def _before_fork(self) -> None:
        try:
            with tempfile.TemporaryFile(prefix="gpucr-canary-", dir=SHARED_MEMORY) as file:
                file.truncate(2 * DATA_BYTES)
                self._memory = mmap.mmap(file.fileno(), 2 * DATA_BYTES)
        except OSError as e:
            raise Impossible(f"no file can be made in {SHARED_MEMORY} ({e.strerror})") from e

    def _device_of(self, rank: int) -> int:
        return rank % self.cuda.device_count()

    def _open(self, rank: int) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.cuda("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(2 * DATA_BYTES), 0)
        pointer = ctypes.c_uint64()
        self.cuda("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), ctypes.c_void_p(address), 0)
        self._own, self._other = (pointer.value + half * DATA_BYTES for half in (rank, 1 - rank))
        self._host_other = address + (1 - rank) * DATA_BYTES
        start = rank * DATA_BYTES
        self._memory[start : start + DATA_BYTES] = bytes(NUMBER_BYTES) + pattern(5)[NUMBER_BYTES:]
        self._device = self.cuda.allocate(DATA_BYTES)
        self._stream = self.cuda.stream()

    def _offer(self) -> None:
        self._open(0)

    def _accept(self) -> None:
        self._open(1)

    def _add(self) -> None:
        self.cuda.launch(self.increment, self._own)
        self.cuda.synchronize()
        self.count += 1

    def _read_other(self) -> None:
        """The neighbour's half, through this GPU."""
        device, size = ctypes.c_uint64(self._device), ctypes.c_size_t(DATA_BYTES)
        self.cuda("cuMemcpyHtoDAsync_v2", device, ctypes.c_void_p(self._host_other), size, self._stream)
        self.cuda.synchronize(self._stream)
        found = self.cuda.read(self._device, DATA_BYTES)
        expect_number(found[:NUMBER_BYTES], self.count, "the other process's half of the shared memory")
        if found[NUMBER_BYTES:] != pattern(5)[NUMBER_BYTES:]:
            raise Wrong("the shared memory does not hold what was written before the checkpoint")

    def _check_first(self) -> None:
        self._add()

    def _check_second(self) -> None:
        self._add()
        self._read_other()

    def _check_first_again(self) -> None:
        self._read_other()
