"""Read and write other processes' device memory, with a CUDA context of gpucr's own and a pinned ring.

Each copy takes a slot of the ring and its stream: device to slot, slot to destination. With as many threads as slots
the bus is always busy, and little is pinned however large the job is. Buffers that threads reuse are pinned themselves,
so their bytes are copied only once (`read_into`, `write_from`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import threading
import uuid as uuids
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from msgspec import Struct

from gpucr.driver import own_use
from gpucr.driver.gpus import list_gpus
from gpucr.errors import InterposerError
from gpucr.interposer.protocol import ON_DEVICE, ON_HOST_NODE
from gpucr.linux.buffers import address_of, at_address, copy

SLOT_BYTES = 32 << 20
WORKERS = 12
"""Measured (H200 machine, 16 processors, 25 GiB): 37 GiB/s down and 43 up."""

GRANULARITY_BYTES = 2 << 20
"""Of memory without an address, on every GPU so far."""

VAULT_BYTES = 640 << 20
"""Device memory used by a vault. Measured (driver 580): 530 MiB on an H200; on an H100 523, and 540 free are enough."""

ROOMY_BYTES = 2 * VAULT_BYTES
"""With so much free a vault may start beside a running job, which may be about to allocate."""

OUT_OF_MEMORY = 2

_READ_WRITE, _PINNED, _POSIX_DESCRIPTOR, _NON_BLOCKING, _PORTABLE = 3, 1, 1, 1, 1
_DIRECT_RDMA_OF_VMM = 110
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"""

_POINTER, _SIZE, _LONG = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64


class VaultFailed(InterposerError):
    """A driver call failed in gpucr's own process; others' memory that it holds is unchanged.

    ``result``: the driver's result; None: there was no call.
    """

    def __init__(self, message: str, *, hint: str | None = None, result: int | None = None) -> None:
        super().__init__(message, hint=hint)
        self.result = result


class _Access(ctypes.Structure):
    _fields_ = (("location_type", ctypes.c_int), ("location", ctypes.c_int), ("flags", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location_type", ctypes.c_int), ("location",
        ctypes.c_int), ("win32", _POINTER), ("compression", ctypes.c_ubyte), ("direct_rdma", ctypes.c_ubyte), ("flags",
        ctypes.c_ubyte * 6),
    )  # fmt: skip


class _Library:
    """libcuda with argument types, and errors for results.

    No work may be left to the default stream: cuMemsetD8 can return before it is done (CUDA's "API synchronization
    behavior"), and streams that do not block do not wait for it. It could set to zero what they have copied since.
    """

    _TYPES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "cuInit": (ctypes.c_uint,),
        "cuDeviceGetCount": (_POINTER,),
        "cuDeviceGetUuid": (_POINTER, ctypes.c_int),
        "cuDeviceGetAttribute": (_POINTER, ctypes.c_int, ctypes.c_int),
        "cuDevicePrimaryCtxRetain": (_POINTER, ctypes.c_int),
        "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
        "cuCtxSetCurrent": (_POINTER,),
        "cuStreamCreate": (_POINTER, ctypes.c_uint),
        "cuStreamSynchronize": (_POINTER,),
        "cuMemHostAlloc": (_POINTER, _SIZE, ctypes.c_uint),
        "cuMemFreeHost": (_POINTER,),
        "cuMemHostRegister_v2": (_POINTER, _SIZE, ctypes.c_uint),
        "cuMemHostUnregister": (_POINTER,),
        "cuMemcpyDtoHAsync_v2": (_POINTER, _LONG, _SIZE, _POINTER),
        "cuMemcpyHtoDAsync_v2": (_LONG, _POINTER, _SIZE, _POINTER),
        "cuMemcpyDtoDAsync_v2": (_LONG, _LONG, _SIZE, _POINTER),
        "cuMemCreate": (_POINTER, _SIZE, _POINTER, ctypes.c_ulonglong),
        "cuMemExportToShareableHandle": (_POINTER, _LONG, ctypes.c_int, ctypes.c_ulonglong),
        "cuMemImportFromShareableHandle": (_POINTER, _POINTER, ctypes.c_int),
        "cuMemAddressReserve": (_POINTER, _SIZE, _SIZE, _LONG, ctypes.c_ulonglong),
        "cuMemAddressFree": (_LONG, _SIZE),
        "cuMemMap": (_LONG, _SIZE, _SIZE, _LONG, ctypes.c_ulonglong),
        "cuMemUnmap": (_LONG, _SIZE),
        "cuMemSetAccess": (_LONG, _SIZE, _POINTER, _SIZE),
        "cuMemRelease": (_LONG,),
        "cuMemsetD8Async": (_LONG, ctypes.c_ubyte, _SIZE, _POINTER),
        "cuModuleLoadData": (_POINTER, ctypes.c_char_p),
        "cuModuleGetFunction": (_POINTER, _POINTER, ctypes.c_char_p),
        "cuLaunchKernel": (_POINTER, *[ctypes.c_uint] * 7, _POINTER, _POINTER, _POINTER),
    }

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        for name, types in self._TYPES.items():
            with contextlib.suppress(AttributeError):  # reported when it is called
                getattr(self._library, name).argtypes = types

    def initialize(self) -> None:
        """Call cuInit. Raises VaultFailed."""
        is_first = self._library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != 0
        with own_use.initializing(is_first=is_first):
            self("cuInit", 0)

    def __call__(self, name: str, *arguments: object) -> None:
        try:
            result = getattr(self._library, name)(*arguments)
        except AttributeError:
            raise VaultFailed(
                f"the driver has no {name}", hint="`gpucr suspend --gpu-state driver` needs none"
            ) from None
        if result != 0:
            raise VaultFailed(
                f"{name} gave {result} in gpucr's own process",
                hint="free some memory on the GPU: gpucr needs 540 MiB there for a moment"
                if result == OUT_OF_MEMORY
                else "see whether other CUDA programs work (`gpucr doctor`)",
                result=result,
            )


class Shown(Struct, frozen=True):
    """Device memory mapped in this process, without gaps. ``parts``: its handles, and their sizes."""

    address: int
    size_bytes: int
    parts: tuple[tuple[int, int], ...]


class _Busy:
    """Counts calls that use a vault, so that `close` waits for them and refuses later ones."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self._is_over = False

    def __enter__(self) -> None:
        with self._changed:
            if self._is_over:
                raise VaultFailed("gpucr's context on the GPU is closed", hint="try again")
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._is_over = True
            while self._count:
                self._changed.wait()


class Vault:
    """For one GPU; thread-safe."""

    def __init__(self, uuid: str, *, pins_ring: bool = True) -> None:
        """Start a context (0.3 s, 530 MiB of device memory), and pin the ring now or when it is needed first.

        Raises VaultFailed, OSError.
        """
        self._cuda, self._shown = _Library(), dict[int, Shown]()
        self._context, self._slots = _POINTER(), queue.SimpleQueue[tuple[int, ctypes.c_void_p]]()
        self._pinned: list[int] = []
        self._lock, self._local = threading.Lock(), threading.local()
        self._buffers: dict[int, tuple[mmap.mmap, int]] = {}
        self._modules: dict[bytes, ctypes.c_void_p] = {}
        self._busy = _Busy()
        self._cuda.initialize()
        self.ordinal = self._find(uuid)
        self._sign: int | None = own_use.note_context()
        try:
            self._cuda("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self.ordinal)
            self._cuda("cuCtxSetCurrent", self._context)
            self._reaches_network = self._has_direct_rdma()
            if pins_ring:
                self._pin_ring()
        except BaseException:
            self.close()
            raise

    def _find(self, uuid: str) -> int:
        count = ctypes.c_int()
        self._cuda("cuDeviceGetCount", ctypes.byref(count))
        wanted = uuids.UUID(uuid.partition("-")[2]).bytes
        for ordinal in range(count.value):
            found = ctypes.create_string_buffer(16)
            self._cuda("cuDeviceGetUuid", found, ordinal)
            if found.raw == wanted:
                return ordinal
        raise VaultFailed(f"gpucr itself cannot use the GPU {uuid}", hint="run it where it may open its device file")

    def _has_direct_rdma(self) -> bool:
        can = ctypes.c_int()
        self._cuda("cuDeviceGetAttribute", ctypes.byref(can), _DIRECT_RDMA_OF_VMM, self.ordinal)
        return can.value == 1

    def _pin_ring(self) -> None:
        with self._lock:
            while len(self._pinned) < WORKERS:
                slot = _POINTER()
                self._cuda("cuMemHostAlloc", ctypes.byref(slot), SLOT_BYTES, 0)
                self._pinned.append(slot.value or 0)
                self._slots.put((slot.value or 0, self._new_stream()))

    def _new_stream(self) -> ctypes.c_void_p:
        stream = _POINTER()
        self._cuda("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        return stream

    def see(self, descriptor: int, size_bytes: int) -> Shown:
        """Map another process's memory from its descriptor. Raises VaultFailed."""
        return self.see_all([(descriptor, size_bytes)])

    def see_all(self, blocks: Sequence[tuple[int, int]]) -> Shown:
        """Map blocks of another process's memory behind each other, from their descriptors and sizes.

        Raises VaultFailed.
        """
        with self._busy:
            self._cuda("cuCtxSetCurrent", self._context)
            parts: list[tuple[int, int]] = []
            try:
                for descriptor, size_bytes in blocks:
                    handle = _LONG()
                    self._cuda("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _POSIX_DESCRIPTOR)
                    parts.append((handle.value, size_bytes))
            except VaultFailed:
                self._release(parts)
                raise
            return self._show(parts)

    def make(self, size_bytes: int, *, on_host: bool = False) -> Shown:
        """New, zeroed memory that can be given to another process, in whole 2 MiB. Raises VaultFailed."""
        return self.make_all([(size_bytes, on_host)])

    def make_all(self, wanted: Sequence[tuple[int, bool]]) -> Shown:
        """As `make`, several behind each other: their sizes, and whether each is on the host. Raises VaultFailed."""
        with self._busy:
            self._cuda("cuCtxSetCurrent", self._context)
            parts: list[tuple[int, int]] = []
            try:
                for size_bytes, on_host in wanted:
                    whole_bytes = -(-size_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES
                    parts.append((self._create(whole_bytes, on_host=on_host), whole_bytes))
            except VaultFailed:
                self._release(parts)
                raise
            made = self._show(parts)
            done, stream = made.address, self._own_stream()
            for _, size_bytes in parts:
                self._cuda("cuMemsetD8Async", done, 0, size_bytes, stream)
                done += size_bytes
            self._cuda("cuStreamSynchronize", stream)
            return made

    def _create(self, size_bytes: int, *, on_host: bool) -> int:
        """A network card can be given it too if the device can: the process may ask for that at any time."""
        kind, place = (ON_HOST_NODE, 0) if on_host else (ON_DEVICE, self.ordinal)
        wanted = _Properties(_PINNED, _POSIX_DESCRIPTOR, kind, place)
        wanted.direct_rdma = int(self._reaches_network and not on_host)
        handle = _LONG()
        self._cuda("cuMemCreate", ctypes.byref(handle), size_bytes, ctypes.byref(wanted), 0)
        return handle.value

    def _show(self, parts: Sequence[tuple[int, int]]) -> Shown:
        """The handles are released if it fails."""
        address, whole, done = _LONG(), sum(size_bytes for _, size_bytes in parts), 0
        access = _Access(ON_DEVICE, self.ordinal, _READ_WRITE)
        try:
            self._cuda("cuMemAddressReserve", ctypes.byref(address), whole, 0, 0, 0)
            for handle, size_bytes in parts:
                at = address.value + done
                self._cuda("cuMemMap", at, size_bytes, 0, handle, 0)
                done += size_bytes
                self._cuda("cuMemSetAccess", at, size_bytes, ctypes.byref(access), 1)
        except VaultFailed:
            self._hide(address.value, parts, done)
            self._release(parts)
            raise
        shown = self._shown[address.value] = Shown(address.value, whole, tuple(parts))
        return shown

    def _hide(self, address: int, parts: Sequence[tuple[int, int]], mapped_bytes: int) -> None:
        """Unmap the first ones, and give up the addresses, if there are any."""
        done = 0
        for _, size_bytes in parts:
            if done < mapped_bytes:
                self._cuda("cuMemUnmap", address + done, size_bytes)
            done += size_bytes
        if address:
            self._cuda("cuMemAddressFree", address, done)

    def _release(self, parts: Sequence[tuple[int, int]]) -> None:
        for handle, _ in parts:
            self._cuda("cuMemRelease", handle)

    def export(self, shown: Shown, part: int = 0) -> int:
        """A descriptor of one part of memory from `make`. Raises VaultFailed."""
        descriptor, (handle, _) = ctypes.c_int(), shown.parts[part]
        with self._busy:
            self._cuda("cuCtxSetCurrent", self._context)
            self._cuda("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _POSIX_DESCRIPTOR, 0)
            return descriptor.value

    def forget(self, shown: Shown) -> None:
        """Unmap it; the memory is freed unless somebody else holds it. Idempotent."""
        if self._shown.pop(shown.address, None) is not None:  # `close` has forgotten all of it
            self._cuda("cuCtxSetCurrent", self._context)
            self._hide(shown.address, shown.parts, shown.size_bytes)
            self._release(shown.parts)

    def kernel(self, image: bytes, name: str) -> ctypes.c_void_p:
        """A function of this PTX. Raises VaultFailed if the driver does not take it."""
        with self._busy, self._lock:
            self._cuda("cuCtxSetCurrent", self._context)
            if image not in self._modules:
                module = _POINTER()
                self._cuda("cuModuleLoadData", ctypes.byref(module), image)
                self._modules[image] = module
            function = _POINTER()
            self._cuda("cuModuleGetFunction", ctypes.byref(function), self._modules[image], name.encode())
            return function

    def launch(self, kernel: ctypes.c_void_p, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        """Run it in the calling thread's stream, and wait. ``arguments``: ctypes values. Raises VaultFailed."""
        pointers = (_POINTER * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        with self._busy:
            stream = self._own_stream()
            self._cuda("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)
            self._cuda("cuStreamSynchronize", stream)

    def read(self, address: int, size_bytes: int, take: Callable[[int, int, int], object]) -> None:
        """Read device memory in pieces: ``take(host address, offset, size)``. Raises VaultFailed."""

        def one(slot: int, stream: ctypes.c_void_p, offset: int, size: int) -> None:
            self._cuda("cuMemcpyDtoHAsync_v2", slot, address + offset, size, stream)
            self._cuda("cuStreamSynchronize", stream)
            take(slot, offset, size)

        self._by_slots(size_bytes, one)

    def write(self, address: int, size_bytes: int, give: Callable[[int, int, int], object]) -> None:
        """Write device memory: ``give(host address, offset, size)`` supplies the pieces. Raises VaultFailed."""

        def one(slot: int, stream: ctypes.c_void_p, offset: int, size: int) -> None:
            give(slot, offset, size)
            self._cuda("cuMemcpyHtoDAsync_v2", address + offset, slot, size, stream)
            self._cuda("cuStreamSynchronize", stream)

        self._by_slots(size_bytes, one)

    def _by_slots(self, size_bytes: int, one: Callable[[int, ctypes.c_void_p, int, int], None]) -> None:
        for offset in range(0, size_bytes, SLOT_BYTES):
            with self._busy:
                self._cuda("cuCtxSetCurrent", self._context)
                if len(self._pinned) < WORKERS:
                    self._pin_ring()
                slot, stream = self._slots.get()
                try:
                    one(slot, stream, offset, min(SLOT_BYTES, size_bytes - offset))
                finally:
                    self._slots.put((slot, stream))

    def read_into(self, address: int, data: memoryview) -> None:
        """Device memory into a buffer; straight into one that is a mapping of its own. Raises VaultFailed."""
        if self._is_pinned(data):
            self._copy_straight("cuMemcpyDtoHAsync_v2", address_of(data), address, len(data))
        else:
            self.read(address, len(data), lambda slot, offset, size: copy(data[offset:], at_address(slot, size)))

    def write_from(self, address: int, data: memoryview) -> None:
        """A buffer into device memory; as `read_into`."""
        if self._is_pinned(data):
            self._copy_straight("cuMemcpyHtoDAsync_v2", address, address_of(data), len(data))
        else:
            self.write(
                address, len(data), lambda slot, offset, size: copy(at_address(slot, size), data[offset:][:size])
            )

    def copy_on_device(self, to: int, start: int, size_bytes: int) -> None:
        """From one address to another. Raises VaultFailed."""
        self._copy_straight("cuMemcpyDtoDAsync_v2", to, start, size_bytes)

    def _copy_straight(self, call: str, to: int, start: int, size_bytes: int) -> None:
        with self._busy:
            stream = self._own_stream()
            self._cuda(call, to, start, size_bytes, stream)
            self._cuda("cuStreamSynchronize", stream)

    def _own_stream(self) -> ctypes.c_void_p:
        """The calling thread's, whose context this is from now on."""
        self._cuda("cuCtxSetCurrent", self._context)
        stream: ctypes.c_void_p | None = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = self._new_stream()
        return stream

    def _is_pinned(self, data: memoryview) -> bool:
        """Whether the buffer is pinned, from its first use until `close`. False if the driver refuses."""
        buffer = data.obj
        if not isinstance(buffer, mmap.mmap) or data.readonly:
            return False
        with self._busy, self._lock:
            self._cuda("cuCtxSetCurrent", self._context)
            if id(buffer) not in self._buffers:
                address = address_of(memoryview(buffer))
                try:
                    self._cuda("cuMemHostRegister_v2", address, len(buffer), _PORTABLE)
                except VaultFailed:
                    address = 0  # a limit on locked memory, for example: the ring takes over
                self._buffers[id(buffer)] = buffer, address  # keeps the mapping alive, and so its id unique
            return self._buffers[id(buffer)][1] != 0

    def close(self) -> None:
        """Free everything, when nothing uses it any more; later calls raise VaultFailed. Takes 0.02 to 0.06 s."""
        self._busy.end()
        for shown in list(self._shown.values()):
            with contextlib.suppress(VaultFailed):
                self.forget(shown)
        with contextlib.suppress(VaultFailed):
            self._cuda("cuCtxSetCurrent", self._context)
        while self._pinned:
            with contextlib.suppress(VaultFailed):
                self._cuda("cuMemFreeHost", self._pinned.pop())
        while self._buffers:
            _, address = self._buffers.popitem()[1]
            if address:
                with contextlib.suppress(VaultFailed):
                    self._cuda("cuMemHostUnregister", address)
        if self._context:
            self._context = _POINTER()
            with contextlib.suppress(VaultFailed):
                self._cuda("cuDevicePrimaryCtxRelease_v2", self.ordinal)
        if self._sign is not None:
            os.close(self._sign)
            self._sign = None


class Vaults:
    """One vault per GPU, started at first use; after `close` again at the next use."""

    def __init__(self, *, pin_rings: bool = True) -> None:
        """``pin_rings``: at their start (see `Vault`)."""
        self._lock = threading.Lock()
        self._vaults: dict[str, Vault] = {}
        self._pin_rings = pin_rings

    def of(self, uuid: str) -> Vault:
        """This GPU's vault. Raises as `Vault`."""
        with self._lock:
            if uuid not in self._vaults:
                self._vaults[uuid] = Vault(uuid, pins_ring=self._pin_rings)
            return self._vaults[uuid]

    def prepare(self) -> None:
        """Let this process use CUDA, which takes time but no device memory. Raises VaultFailed, OSError."""
        _Library().initialize()

    def start_if_roomy(self, uuid: str) -> None:
        """Start this GPU's vault if the jobs that run there keep enough room for what they may allocate meanwhile."""
        free_bytes = next((gpu.memory_free_bytes for gpu in list_gpus() if gpu.uuid == uuid), 0)
        if free_bytes >= ROOMY_BYTES:
            self.try_all([uuid])

    def try_all(self, uuids: Iterable[str]) -> bool:
        """Start the vaults of these GPUs. False: one has no room, which `start_all` reports if it stays so.

        On a GPU that is nearly full the driver gives 2, on one without any room also 999 (measured, driver 580).
        """
        try:
            self.start_all(uuids)
        except VaultFailed as error:
            if error.result is not None:
                return False
            raise
        return True

    def start_all(self, uuids: Iterable[str]) -> None:
        """Start the vaults of these GPUs. Raises as `Vault`."""
        for uuid in uuids:
            self.of(uuid)

    def needed_bytes(self, uuid: str) -> int:
        """How much device memory this GPU's vault would still take."""
        return 0 if uuid in self._vaults else VAULT_BYTES

    def __len__(self) -> int:
        """How many there are."""
        return len(self._vaults)

    def close(self) -> None:
        with self._lock:
            while self._vaults:
                self._vaults.popitem()[1].close()


def in_parallel(calls: Sequence[Callable[[], None]], threads: int = WORKERS) -> None:
    """Run all of them in several threads; raises the first error when all threads have ended."""
    waiting, errors = queue.SimpleQueue[Callable[[], None]](), list[BaseException]()
    for call in calls:
        waiting.put(call)

    def work() -> None:
        while not errors:
            try:
                waiting.get_nowait()()
            except queue.Empty:
                return
            except Exception as e:  # noqa: BLE001 (raised below, in the caller's thread)
                errors.append(e)

    workers = [threading.Thread(target=work, name="vault") for _ in range(min(threads, len(calls)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
