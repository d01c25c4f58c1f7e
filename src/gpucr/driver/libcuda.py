"""The project's only binding of libcuda.so.1: its checkpoint functions, raw, with result codes instead of exceptions.

Import budget: ctypes and nothing else. The drop-in ``cuda-checkpoint`` is forked several times for every process of a
dump, so dataclasses, enum, typing, re and the rest of gpucr stay out of this module (a test asserts it).

None of the checkpoint functions needs cuInit in the caller (measured on driver 580). ctypes releases the GIL during a
call, so several threads can act on several processes at once. Layouts and constants follow CUDA 13.4's cuda.h; they are
tested against cuda-bindings.
"""

from __future__ import annotations

import ctypes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

SONAME = "libcuda.so.1"

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
NO_DEVICE = 100
INVALID_CONTEXT = 201
OPERATING_SYSTEM = 304
ILLEGAL_STATE = 401
NOT_READY = 600
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
UNKNOWN = 999

RUNNING = 0
LOCKED = 1
CHECKPOINTED = 2
STATE_WORDS = ("running", "locked", "checkpointed", "failed", "checkpointing", "restoring")

UUID_SIZE_BYTES = 16

API_13_4 = 13040
CUSTOM_STORAGE = ("cuCheckpointProcessCheckpoint", "cuCheckpointProcessRestore", "cuCheckpointOperationComplete")
"""The functions that hand device memory over, in their CUDA 13.4 version; dlsym would return an older one."""


class GpuPair(ctypes.Structure):
    """CUcheckpointGpuPair: memory of the GPU ``oldUuid`` is restored to the GPU ``newUuid``."""

    _fields_ = (
        ("oldUuid", ctypes.c_ubyte * UUID_SIZE_BYTES),
        ("newUuid", ctypes.c_ubyte * UUID_SIZE_BYTES),
    )


class LockArgs(ctypes.Structure):
    """CUcheckpointLockArgs. ``timeoutMs`` 0: no limit."""

    _fields_ = (
        ("timeoutMs", ctypes.c_uint32),
        ("reserved0", ctypes.c_uint32),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class CheckpointArgs(ctypes.Structure):
    """CUcheckpointCheckpointArgs. ``customStorageInfo_out`` is read by drivers with API 13.4 and newer."""

    _fields_ = (
        ("customStorageInfo_out", ctypes.c_void_p),
        ("reserved", ctypes.c_char * 56),
    )


class RestoreArgs(ctypes.Structure):
    """CUcheckpointRestoreArgs. ``gpuPairs`` is read from CUDA 13.0 on, ``customStorageInfo_out`` from API 13.4 on."""

    _fields_ = (
        ("gpuPairs", ctypes.POINTER(GpuPair)),
        ("gpuPairsCount", ctypes.c_uint32),
        ("padding0", ctypes.c_uint32),
        ("customStorageInfo_out", ctypes.c_void_p),
        ("reserved", ctypes.c_char * 40),
    )


class UnlockArgs(ctypes.Structure):
    """CUcheckpointUnlockArgs: only reserved bytes."""

    _fields_ = (("reserved", ctypes.c_uint64 * 8),)


_INT_P = ctypes.POINTER(ctypes.c_int)
_TEXT_P = ctypes.POINTER(ctypes.c_char_p)

# Every function returns CUresult, a C enum the size of an int.
_FUNCTIONS = (
    ("cuInit", (ctypes.c_uint,)),
    ("cuDriverGetVersion", (_INT_P,)),
    ("cuGetErrorString", (ctypes.c_int, _TEXT_P)),
    ("cuGetErrorName", (ctypes.c_int, _TEXT_P)),
    ("cuCheckpointProcessGetState", (ctypes.c_int, _INT_P)),
    ("cuCheckpointProcessGetRestoreThreadId", (ctypes.c_int, _INT_P)),
    ("cuCheckpointProcessLock", (ctypes.c_int, ctypes.POINTER(LockArgs))),
    ("cuCheckpointProcessCheckpoint", (ctypes.c_int, ctypes.POINTER(CheckpointArgs))),
    ("cuCheckpointProcessRestore", (ctypes.c_int, ctypes.POINTER(RestoreArgs))),
    ("cuCheckpointProcessUnlock", (ctypes.c_int, ctypes.POINTER(UnlockArgs))),
)


class LibraryNotLoaded(Exception):
    """dlopen failed: there is no libcuda.so.1, or the loader refuses it. The message is the loader's."""


class FunctionsMissing(Exception):
    """The library has no checkpoint functions: the driver is older than 570. ``names`` are the missing functions."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__("missing in " + SONAME + ": " + ", ".join(names))
        self.names = tuple(names)


class Libcuda:
    """The loaded library. Methods return the CUresult, or a tuple of CUresult and value.

    A pid must fit a C int and a timeout 32 bits: ctypes silently truncates larger values.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        missing = []
        for name, argtypes in _FUNCTIONS:
            try:
                function = getattr(library, name)
            except AttributeError:
                missing.append(name)
                continue
            function.argtypes = argtypes
            function.restype = ctypes.c_int
        if missing:
            raise FunctionsMissing(missing)
        self._cuda = library

    @property
    def has_custom_storage(self) -> bool:
        """Whether the driver has custom storage, detected as documented: an older driver does not know CUDA 13.4."""
        return all(self.find(name, API_13_4) for name in CUSTOM_STORAGE)

    def find(self, name: str, version: int) -> int | None:
        """The address of the function in the version for this CUDA release; None if there is none."""
        try:
            look_up = self._cuda.cuGetProcAddress_v2
        except AttributeError:
            return None
        function, status = ctypes.c_void_p(), ctypes.c_int()
        arguments = (name.encode(), ctypes.byref(function), version, ctypes.c_uint64(0), ctypes.byref(status))
        return function.value if look_up(*arguments) == SUCCESS and status.value == 0 else None

    def is_initialized(self) -> bool:
        """Whether cuInit has been called in this process."""
        return int(self._cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) == SUCCESS

    def init(self) -> int:
        """Call cuInit(0), which costs 0.3 to 2.7 s the first time in a process."""
        return int(self._cuda.cuInit(0))

    def version(self) -> tuple[int, int]:
        """The CUDA version of the driver, 13000 for 13.0."""
        value = ctypes.c_int()
        return int(self._cuda.cuDriverGetVersion(ctypes.byref(value))), value.value

    def error_text(self, result: int) -> str:
        """cuGetErrorString's text, such as ``invalid argument``."""
        return self._text(self._cuda.cuGetErrorString, result) or "unrecognized error code " + str(result)

    def error_name(self, result: int) -> str:
        """cuGetErrorName's text, such as ``CUDA_ERROR_INVALID_VALUE``."""
        return self._text(self._cuda.cuGetErrorName, result) or "CUresult " + str(result)

    def process_state(self, pid: int) -> tuple[int, int]:
        """The process's CUprocessState; may be unknown to this version."""
        value = ctypes.c_int()
        return int(self._cuda.cuCheckpointProcessGetState(pid, ctypes.byref(value))), value.value

    def restore_thread_id(self, pid: int) -> tuple[int, int]:
        """The id of the thread in the target that does the driver's work."""
        value = ctypes.c_int()
        return int(self._cuda.cuCheckpointProcessGetRestoreThreadId(pid, ctypes.byref(value))), value.value

    def lock(self, pid: int, timeout_ms: int = 0) -> int:
        """RUNNING → LOCKED; NOT_READY if the timeout passed: the process is RUNNING again."""
        return int(self._cuda.cuCheckpointProcessLock(pid, ctypes.byref(LockArgs(timeoutMs=timeout_ms))))

    def checkpoint(self, pid: int) -> int:
        return int(self._cuda.cuCheckpointProcessCheckpoint(pid, ctypes.byref(CheckpointArgs())))

    def restore(self, pid: int, uuid_pairs: Sequence[tuple[bytes, bytes]] = ()) -> int:
        """CHECKPOINTED → LOCKED. ``uuid_pairs`` are (old, new), 16 bytes each."""
        args = RestoreArgs()
        if uuid_pairs:
            if any(len(uuid) != UUID_SIZE_BYTES for pair in uuid_pairs for uuid in pair):
                raise ValueError("a GPU UUID has 16 bytes")
            raw = b"".join(old + new for old, new in uuid_pairs)
            args.gpuPairs = (GpuPair * len(uuid_pairs)).from_buffer_copy(raw)
            args.gpuPairsCount = len(uuid_pairs)
        return int(self._cuda.cuCheckpointProcessRestore(pid, ctypes.byref(args)))

    def unlock(self, pid: int) -> int:
        return int(self._cuda.cuCheckpointProcessUnlock(pid, ctypes.byref(UnlockArgs())))

    def _text(self, function: ctypes._NamedFuncPointer, result: int) -> str:
        # An unknown code leaves the pointer NULL and returns INVALID_VALUE.
        text = ctypes.c_char_p()
        function(result, ctypes.byref(text))
        return (text.value or b"").decode("utf-8", "replace")


def load(path: str | None = None) -> Libcuda:
    """Load the driver's library: ``path``, or libcuda.so.1 as the dynamic loader finds it.

    Raises LibraryNotLoaded if there is none, FunctionsMissing if the driver has no checkpoint functions.
    """
    try:
        library = ctypes.CDLL(path or SONAME)
    except OSError as e:
        raise LibraryNotLoaded(str(e)) from e
    return Libcuda(library)
