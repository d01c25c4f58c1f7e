"""An example of a kind of backend: what to write to add one.

`Vault` is the kind, `Held` has a part of a process's memory while that is away, and `Returned` brings it into a
restored process. `gpucr.gpu_state.backend` says what each method must do, and `gpucr.gpu_state.order` when it is
called. `kinds.register(Vault())` makes dumps and restores use it.

This one moves a known range of a process into gpucr's own memory, and would lose it if gpucr were killed meanwhile. A
real kind gives its memory to the guard, too: `backend_for` names a recovery action to ``protection``.

test_backends.py runs whole operations with it, and lets it fail.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ, PROT_WRITE

from gpucr.errors import SnapshotError
from gpucr.gpu_state.backend import WaitForBytes
from gpucr.gpu_state.staging.attach import reserve, traced
from gpucr.linux.injection import MAP_FIXED, MMAP, run_syscall
from gpucr.model import DevicePart, StagedExtent
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Meter

MIB = 1 << 20
SIZE_BYTES = 9 * MIB + 4096


def bytes_of(pid: int, address: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        return os.pread(memory.fileno(), SIZE_BYTES, address)


def mapped(thread: int, content: bytes, address: int = 0) -> int:
    """Map private memory with this content in the thread's process; where, unless the address says so."""
    flags = MAP_PRIVATE | MAP_ANONYMOUS | (MAP_FIXED if address else 0)
    with traced(thread) as stopped:
        found = run_syscall(stopped, MMAP, address, SIZE_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0)
    with open(f"/proc/{thread}/mem", "r+b", buffering=0) as memory:
        assert os.pwrite(memory.fileno(), content, found) == SIZE_BYTES
    return found


class Vault:
    """A kind of backend that moves a known range of a process into this process's own memory."""

    name = "vault"

    def __init__(self) -> None:
        self.addresses: dict[int, int] = {}
        self.contents: dict[int, bytes] = {}
        self.log: list[tuple[str, int]] = []
        self.lacks: str | None = None
        self.fails: dict[str, list[int]] = {"begin": [], "give_back": []}  # pids, for which this fails once

    def fill(self, pid: int) -> None:
        """Let the process have some memory that this kind holds while it is away."""
        self.contents[pid] = os.urandom(4 * MIB) + bytes(4 * MIB) + os.urandom(MIB + 4096)
        self.addresses[pid] = mapped(pid, self.contents[pid])

    def assert_is_there(self, pid: int) -> None:
        assert bytes_of(pid, self.addresses[pid]) == self.contents[pid]

    def may_fail(self, action: str, pid: int) -> None:
        self.log.append((action, pid))
        if pid in self.fails.get(action, ()):
            self.fails[action].remove(pid)
            raise SnapshotError(f"the vault fails to {action}", path="vault")

    def backend_for(self, part: DevicePart, protection: Protection) -> Held | None:
        return Held(self, part, self.addresses[part.pid]) if part.pid in self.addresses else None

    def missing(self) -> str | None:
        return self.lacks

    def return_for(self, part: DevicePart, extents: Sequence[StagedExtent], size_bytes: int) -> Returned:
        (extent,) = extents
        return Returned(self, part, extent)


class Held:
    """A `Backend`, and its own `Source`: bytes of this process that come to be there little by little."""

    kind = Vault.name

    def __init__(self, vault: Vault, part: DevicePart, address: int) -> None:
        self.part = part
        self.size_bytes = SIZE_BYTES
        self.extents = (StagedExtent(address, SIZE_BYTES, 0),)
        self._vault = vault
        self._thread = 0
        self._bytes: bytes | None = None
        self._told_bytes = 0

    @property
    def source(self) -> Held | None:
        return self if self._bytes is not None else None

    def read_into(self, position: int, data: memoryview) -> None:
        assert self._bytes is not None
        if position + len(data) > self._told_bytes:
            raise SnapshotError("it is read before it is there", path="vault")
        data[:] = self._bytes[position : position + len(data)]

    def available_bytes(self) -> int:
        self._told_bytes = min(self._told_bytes + 4 * MIB, SIZE_BYTES)
        return self._told_bytes

    def prepare(self, size_bytes: int) -> int:
        self._vault.log.append(("prepare", self.part.pid))
        return min(size_bytes, SIZE_BYTES)

    def wait_prepared(self) -> None: ...

    def begin(self, restore_thread: int, meter: Meter, deadline: float | None) -> None:
        self._vault.may_fail("begin", self.part.pid)
        self._thread = restore_thread
        self._bytes = bytes_of(self.part.pid, self.extents[0].address)
        with traced(restore_thread) as stopped:
            reserve(stopped, self.extents[0])

    def wait_started(self) -> None:
        self._vault.log.append(("away", self.part.pid))

    def complete(self, meter: Meter) -> None:
        self._told_bytes = SIZE_BYTES
        self._vault.log.append(("complete", self.part.pid))

    def abort(self) -> None:
        self._vault.log.append(("abort", self.part.pid))

    def make_way(self) -> None: ...

    def give_back(self) -> None:
        if self._thread:
            self._vault.may_fail("give_back", self.part.pid)
            assert self._bytes is not None
            mapped(self._thread, self._bytes, self.extents[0].address)
            self._thread = 0

    def close(self) -> None: ...


class Returned:
    """A `Return`, and its own `Destination`, which is full of other bytes before."""

    note = None
    is_zeroed = False

    def __init__(self, vault: Vault, part: DevicePart, extent: StagedExtent) -> None:
        self.part = part
        self.size_bytes = extent.size_bytes
        self.destination = self
        self._vault = vault
        self._extent = extent
        self._bytes = bytearray(b"x" * extent.size_bytes)

    def write_from(self, position: int, data: memoryview) -> None:
        self._bytes[position : position + len(data)] = data

    def begin(self, pid: int, restore_thread: int, wait: WaitForBytes, *, stays: bool) -> None:
        assert not stays
        assert wait(self.size_bytes) == self.size_bytes
        mapped(restore_thread, bytes(self._bytes), self._extent.address)
        self._vault.log.append(("give_back", pid))

    def finish(self) -> None: ...

    def close(self) -> None: ...
