"""Messages on the agent's socket, as defined in native/protocol.h."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from mmap import PAGESIZE

from msgspec import Struct

from gpucr.model import uuid_text

MAGIC = 0x49555047
VERSION = 1
MOST_RECORDS = 128
MOST_BLOCKS = 1 << 20
"""Maximum per process: 2 TiB in pieces of 2 MiB."""

_MOST_BLOCK_BYTES = 1 << 42
_MOST_DEVICES, _UUID_BYTES = 64, 16
DRIVER_ERROR = 0x10000
ON_DEVICE, ON_HOST_NODE = 1, 3
"""CUmemLocationType, of a block."""

_INSIDE = struct.Struct("<i60s")
_HEAD = struct.Struct("<IHHIIQQ")
_RECORD = struct.Struct("<IIQiiIIQiI")
MOST_BYTES = _HEAD.size + MOST_RECORDS * _RECORD.size


class Operation(enum.IntEnum):
    """Requests."""

    HELLO = 1
    STATUS = 2
    CLOSE = 3
    OPEN = 4
    EXPORT = 5
    DROP = 6
    IMPORT = 7
    CREATE = 8
    LIST = 9
    KEEP = 10
    FETCH = 11
    TRACE = 13
    HOOKS = 14
    FILL = 15
    SHOW = 16
    LEND = 17
    DEVICES = 18


class Drops(enum.IntEnum):
    """What a DROP releases: what was exported on this connection, what other processes own, or both."""

    OWN = 0
    ALL = 1
    IMPORTED = 2


class Hooks(enum.IntEnum):
    """When the program's functions are called."""

    BEFORE_FREEZE = 0
    AFTER_RESTORE = 1


class Kept(enum.IntEnum):
    """What a process can keep for its restore: the bytes of its memory, and who shares it."""

    MEMORY = 0
    SHARES = 1


class Code(enum.IntEnum):
    """Why a request failed."""

    DONE = 0
    MALFORMED = 1
    WRONG_VERSION = 2
    BUSY = 3
    GATE_NOT_CLOSED = 4
    SOMEBODY_INSIDE = 5
    MEMORY_IS_AWAY = 6
    UNKNOWN_BLOCK = 7
    NOT_AWAY = 8
    NO_DESCRIPTORS = 9
    NO_MEMORY = 10
    NO_DRIVER = 11
    NOT_HERE = 12
    TOO_SLOW = 13
    GATE_IS_CLOSED = 14
    CLOSED_BY_PROGRAM = 15


class Flag(enum.IntFlag):
    """Properties of a block other than the process's own movable memory.

    RETURNED: its own, but imported as the driver sees it, because it came back by a descriptor.
    """

    IMPORTED = 1
    CANNOT_LEAVE = 2
    AWAY = 4
    SHARED = 8
    MULTICAST = 16
    RETURNED = 32


class Refused(Exception):
    """The agent refused or failed: ``code`` is a Code, or the driver's CUresult plus DRIVER_ERROR."""

    def __init__(self, operation: Operation, code: int) -> None:
        self.operation, self.code = operation, code
        super().__init__(f"the agent did not {operation.name.lower()}: {self.reason}")

    @property
    def result(self) -> int | None:
        """The driver's result; None: not a driver error."""
        return self.code - DRIVER_ERROR if self.code >= DRIVER_ERROR else None

    @property
    def reason(self) -> str:
        """In words."""
        if self.result is not None:
            return f"the driver's result was {self.result}"
        try:
            return Code(self.code).name.lower().replace("_", " ")
        except ValueError:
            return f"unknown code {self.code}"


class BadAnswer(Exception):
    """The message violates the protocol."""


class OtherVersion(BadAnswer):
    """The process has another gpucr's library: a job keeps the one that it was started with."""


class Block(Struct, frozen=True):
    """One piece of the process's physical memory, mapped at ``address`` (0: not mapped).

    ``size_bytes`` is 0 if it was imported. ``descriptor``: number of a descriptor in that process that identifies a
    block shared with other processes (`sharing`); -1: none.
    """

    index: int
    generation: int
    size_bytes: int
    location_type: int
    location: int
    flags: Flag
    mappings: int
    address: int
    descriptor: int

    def pack(self) -> bytes:
        """Encoded for the agent."""
        return _RECORD.pack(
            self.index, self.generation, self.size_bytes, self.location_type, self.location, self.flags,
            self.mappings, self.address, self.descriptor, 0,
        )  # fmt: skip


class Status(Struct, frozen=True):
    """What the process has, and the state of its gate.

    ``foreign``: blocks that are imported as the driver sees it and mapped now, of other processes or RETURNED. A driver
    that checkpoints a process with one cannot restore it (measured, driver 580: 801). ``captive``: of these, those that
    cannot leave the process.
    """

    gate_closed: int
    inside: int
    captures: int
    blocks: int
    block_bytes: int
    imported: int
    stuck: int
    stuck_bytes: int
    foreign: int
    captive: int
    away: int
    small: int
    small_bytes: int
    managed: int
    managed_bytes: int
    multicast: int
    dma_buf: int
    arrays: int
    pools: int
    pool_allocations: int
    ipc_memory: int
    ipc_events: int
    peer_access: int
    external: int
    around: int
    opencl: int
    traceable: int
    hooks: int


class Answer(Struct, frozen=True):
    """The agent's message: two numbers and the rest."""

    code: int
    a: int
    b: int
    count: int
    payload: bytes

    def blocks(self) -> list[Block]:
        """The records. Raises BadAnswer if there are fewer than it says."""
        if len(self.payload) != self.count * _RECORD.size:
            raise BadAnswer("the agent's records are cut short")
        found = [
            Block(index, generation, size, kind, location, Flag(flags), *rest)
            for index, generation, size, kind, location, flags, *rest, _ in _RECORD.iter_unpack(self.payload)
        ]
        if any(each.size_bytes % PAGESIZE or each.size_bytes > _MOST_BLOCK_BYTES for each in found):
            raise BadAnswer("the agent has blocks of impossible sizes")
        return found

    def inside(self) -> tuple[int, str]:
        """A thread inside the driver, as numbered in its process, and the function; 0: none is left.

        Raises BadAnswer.
        """
        if len(self.payload) != _INSIDE.size:
            raise BadAnswer("the agent does not say who is inside the driver")
        thread, function = _INSIDE.unpack(self.payload)
        return thread, function.partition(b"\0")[0].decode("ascii", "replace")

    def devices(self) -> tuple[str, ...]:
        """The UUIDs of its devices. Raises BadAnswer."""
        if len(self.payload) != self.a * _UUID_BYTES or self.a > _MOST_DEVICES:
            raise BadAnswer("the agent's list of devices has another length")
        return tuple(uuid_text(self.payload[at : at + _UUID_BYTES]) for at in range(0, len(self.payload), _UUID_BYTES))

    def status(self) -> Status:
        """The numbers of a status. Raises BadAnswer."""
        layout = struct.Struct(f"<{len(Status.__struct_fields__)}Q")
        if len(self.payload) != layout.size:
            raise BadAnswer("the agent's status has another length")
        return Status(*layout.unpack(self.payload))


def request(operation: Operation, a: int = 0, b: int = 0, blocks: Sequence[Block] = ()) -> bytes:
    """A packet for the agent."""
    head = _HEAD.pack(MAGIC, VERSION, operation, 0, len(blocks), a, b)
    return head + b"".join(block.pack() for block in blocks)


def parse(packet: bytes, operation: Operation) -> Answer:
    """The agent's packet. Raises BadAnswer if it is malformed or answers another request."""
    if len(packet) < _HEAD.size:
        raise BadAnswer("the agent's answer is cut short")
    magic, version, answered, code, count, a, b = _HEAD.unpack_from(packet)
    if magic != MAGIC or count > MOST_RECORDS:
        raise BadAnswer("what answers is not an agent")
    if code == Code.BUSY:
        return Answer(code, a, b, count, b"")
    if version != VERSION:
        raise OtherVersion(f"the agent speaks version {version} of the protocol, this gpucr version {VERSION}")
    if answered != operation and code == Code.DONE:
        raise BadAnswer(f"the agent answers {answered}, asked was {operation}")
    return Answer(code, a, b, count, packet[_HEAD.size :])
