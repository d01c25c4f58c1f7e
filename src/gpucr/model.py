"""Frozen records that every layer shares. No behaviour beyond parsing and formatting; no I/O."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import NamedTuple

from msgspec import Struct, field

from gpucr.errors import InvalidRequest

_UUID_DIGITS = re.compile(r"[0-9a-f]{32}", re.IGNORECASE)


class CudaState(enum.IntEnum):
    """CUprocessState, as the driver reports it. Open: an unlisted value is kept as ``UNKNOWN_<n>``."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    RESTORING = 5

    @classmethod
    def _missing_(cls, value: object) -> CudaState | None:
        if not isinstance(value, int):
            return None
        member = int.__new__(cls, value)
        member._name_ = f"UNKNOWN_{value}"
        member._value_ = value
        return member

    @property
    def word(self) -> str:
        """The word that commands print: ``running``, ``locked``, ``checkpointed``, ``failed``, ..."""
        return self.name.lower()


class ProcessId(Struct, frozen=True, order=True):
    """The identity of a process: a pid alone can be reused.

    ``start_time_ticks`` is field 22 of ``/proc/PID/stat`` (clock ticks after boot), as seen outside all time
    namespaces.
    """

    pid: int
    start_time_ticks: int

    def is_same(self, other: ProcessId) -> bool:
        """Whether both name one process. gpucr commands in two time namespaces can see start times one tick apart.

        The kernel rounds a sum of nanoseconds to ticks. No pid is reused within a tick: the kernel assigns all others
        first.
        """
        return self.pid == other.pid and abs(self.start_time_ticks - other.start_time_ticks) <= 1


class Gpu(Struct, frozen=True):
    """One GPU as NVML shows it. ``uuid`` in the form ``GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx``."""

    index: int
    uuid: str
    name: str
    memory_total_bytes: int
    memory_free_bytes: int
    mig_enabled: bool = field(default_factory=bool)  # so that records.py detects missing members


class GpuActivity(Struct, frozen=True):
    """One GPU's utilization (the share of the last interval in which it was busy) and temperature.

    None: NVML cannot tell.
    """

    utilization_percent: int | None = None
    temperature_c: int | None = None


class GpuUse(Struct, frozen=True):
    """Device memory that one process holds on one GPU (NVML). None: NVML cannot tell."""

    pid: int
    gpu_uuid: str
    used_bytes: int | None


def uuid_bytes(uuid: str) -> bytes:
    """The 16 bytes of a GPU's UUID, for ``CUcheckpointGpuPair``.

    With ``GPU-`` in front, as NVML writes it, or without, as cuda.core does. Raises InvalidRequest for anything else.
    """
    digits = (uuid[4:] if uuid[:4].upper() == "GPU-" else uuid).replace("-", "")
    if not _UUID_DIGITS.fullmatch(digits):
        raise InvalidRequest(
            f"{uuid!r} is not a GPU UUID",
            hint="a GPU UUID looks like GPU-6b1e4d2c-0f3a-4c52-9c53-0a6f5a1d7e88; `nvidia-smi -L` lists them",
        )
    return bytes.fromhex(digits)


def uuid_text(raw: bytes) -> str:
    """The ``GPU-…`` form of 16 UUID bytes."""
    h = raw.hex()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def gpu_pairs(text: str) -> tuple[tuple[str, str], ...]:
    """The two sides of every ``OLD=NEW`` of a list, as typed. Raises InvalidRequest for any other form."""
    pairs: list[tuple[str, str]] = []
    for part in text.split(","):
        old, equals, new = (piece.strip() for piece in part.partition("="))
        if not (old and equals and new):
            raise InvalidRequest(
                f"{part!r} is not of the form OLD=NEW", hint="write --gpu-map OLD=NEW,OLD=NEW", code="GPUCR-BAD-GPU"
            )
        pairs.append((old, new))
    return tuple(pairs)


class GpuMap(Struct, frozen=True):
    """Where a restore puts device memory: (old UUID, new UUID) pairs.

    The driver requires every GPU that it knows for the process once on the left, and the new GPUs as a permutation. It
    knows all whose device files existed when the process started CUDA, regardless of ``CUDA_VISIBLE_DEVICES``.
    """

    pairs: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> GpuMap:
        """Read ``OLD=NEW,OLD=NEW``. Raises InvalidRequest if a UUID is malformed or named twice on one side."""
        pairs = [(uuid_text(uuid_bytes(old)), uuid_text(uuid_bytes(new))) for old, new in gpu_pairs(text)]
        for side, name in ((0, "left"), (1, "right")):
            uuids = [pair[side] for pair in pairs]
            if len(set(uuids)) != len(uuids):
                raise InvalidRequest(
                    f"a GPU appears twice on the {name} side of the GPU map {text!r}", code="GPUCR-BAD-GPU"
                )
        return cls(tuple(pairs))

    def __str__(self) -> str:
        return ",".join(f"{old}={new}" for old, new in self.pairs)

    def new_for(self, old_uuid: str) -> str:
        """The UUID that ``old_uuid`` maps to; itself if the map does not name it."""
        return dict(self.pairs).get(old_uuid, old_uuid)

    @property
    def reversed(self) -> GpuMap:
        """The inverse map."""
        return GpuMap(tuple((new, old) for old, new in self.pairs))

    def only(self, old_uuids: Iterable[str]) -> GpuMap:
        """The part of the map for these GPUs: the driver refuses pairs of GPUs that a process does not have."""
        chosen = set(old_uuids)
        return GpuMap(tuple(pair for pair in self.pairs if pair[0] in chosen))


class Extent(Struct, frozen=True):
    """A range of a process's address space, in bytes."""

    address: int
    size_bytes: int


class StagedExtent(Struct, frozen=True, omit_defaults=True):
    """A range of staging that lies in a staging file: address in the process, size, and offset in the file (bytes).

    Address and offset are page-aligned, and the size is in whole pages. ``gpu``: the UUID of the GPU that it was on, if
    needed outside the driver.
    """

    address: int
    size_bytes: int
    offset: int
    gpu: str | None = None

    @property
    def end(self) -> int:
        """The first address after it."""
        return self.address + self.size_bytes


CHECK_KNOWN_S = 24 * 3600.0
"""A dump reads what it relies on in a store if that was last done longer ago (`store/read_back.py`)."""

KIND_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
"""Pattern of a backend kind's name (see gpu_state/backend.py)."""


class DevicePart(NamedTuple):
    """The part of a process's device memory that one backend holds (see gpu_state/backend.py).

    Level 0 is what the driver itself delivers; the backends above it follow. Its text names files and areas of a store.
    """

    pid: int
    level: int = 0

    def __str__(self) -> str:
        """``PID`` or ``PID-LEVEL``."""
        return f"{self.pid}-{self.level}" if self.level else str(self.pid)


class JobFile(Struct, frozen=True):
    """A regular file that a job has open or mapped, by its path in the job's mount namespace.

    ``is_written``: a process can write to it. ``is_mapped``: a process has it mapped.
    """

    path: str
    size_bytes: int
    is_written: bool
    is_mapped: bool


class FileLock(Struct, frozen=True, order=True):
    """A lock on a file: its kind as the kernel names it, and the bytes from ``start`` to ``end`` (None: to the end)."""

    path: str
    kind: str
    is_write: bool
    start: int = 0
    end: int | None = None


class Endpoint(Struct, frozen=True, order=True):
    """One end of a TCP connection, or a listening address: an IPv4 or IPv6 address in its shortest form, a port."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    def require_valid(self) -> None:
        """Raise ValueError if it is not what it should be: for one that was read from a file."""
        try:
            is_shortest = str(ip_address(self.address)) == self.address
        except ValueError:
            is_shortest = False
        if not is_shortest or not 1 <= self.port < 1 << 16:
            raise ValueError(f"{self.address!r} and {self.port} are not an address and a port")


class Connection(Struct, frozen=True, order=True):
    """A TCP connection, seen from one end."""

    local: Endpoint
    remote: Endpoint

    def __str__(self) -> str:
        return f"{self.local} to {self.remote}"


def moved(end: Endpoint, addresses: Mapping[str, str]) -> Endpoint:
    """The same port at the new address, if there is one. ``addresses``: by the old ones."""
    return Endpoint(addresses.get(end.address, end.address), end.port)


class ProcessInfo(Struct, frozen=True):
    """What /proc says about one process.

    ``ns_pids`` are its pids from the caller's pid namespace inwards (NSpid); ``status`` is the state letter of
    ``/proc/PID/stat``, ``terminal`` the number of its controlling terminal there (0: none).
    """

    id: ProcessId
    parent_pid: int
    session_id: int
    ns_pids: tuple[int, ...]
    uid: int
    status: str
    name: str
    command_line: tuple[str, ...]
    terminal: int = 0

    @property
    def pid(self) -> int:
        """The pid in the caller's pid namespace."""
        return self.id.pid


class GangMember(Struct, frozen=True):
    """One CUDA process of a job and the state in which it was found, to which every undo leads back."""

    id: ProcessId
    found: CudaState

    @property
    def pid(self) -> int:
        """The pid in the caller's pid namespace."""
        return self.id.pid

    @property
    def lasting_state(self) -> CudaState:
        """The state in which a resume, or a restore, leaves it.

        RUNNING if it was found LOCKED, which is not the job's own wish: what had locked it was killed, or is another
        tool.
        """
        return CudaState.RUNNING if self.found is CudaState.LOCKED else self.found


class GangLock(Struct, frozen=True):
    """How the CUDA processes of a job were locked: how many, in how many attempts, and the wall seconds that it took.

    More than one attempt: some waited for others on the GPU, which were released for a moment and locked again.
    """

    processes: int
    attempts: int
    seconds: float


class Job(Struct, frozen=True):
    """One or more process trees, handled as one.

    ``processes`` has the root first, and each tree contiguous; ``gang`` has those with CUDA, of all trees.
    ``other_root_pids`` are the roots of all trees but the first.
    """

    processes: tuple[ProcessInfo, ...]
    gang: tuple[GangMember, ...]
    other_root_pids: tuple[int, ...] = ()

    @property
    def root(self) -> ProcessInfo:
        """The process whose pid names the job."""
        return self.processes[0]

    @property
    def root_pids(self) -> tuple[int, ...]:
        """The pids of the roots of all trees."""
        return (self.root.pid, *self.other_root_pids)

    @property
    def trees(self) -> tuple[Job, ...]:
        """Each of its trees as a job."""
        starts = [number for number, each in enumerate(self.processes) if each.pid in self.root_pids]
        trees = [self.processes[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
        return tuple(Job(tree, tuple(m for m in self.gang if m.id in {p.id for p in tree})) for tree in trees)

    @property
    def pids(self) -> tuple[int, ...]:
        """The pids of all processes, root first."""
        return tuple(process.pid for process in self.processes)
