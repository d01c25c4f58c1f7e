"""How a dump with leave-running keeps a job's device memory unchanged for writing while the job continues.

If there is room, memory that comes back to an interposed process is copied on the GPU, and the original stays there for
gpucr to read, which takes almost no time. Otherwise, after a first pass, only what differs from what that saved is
copied, on the GPU or to host memory; without one, all of it goes to host memory at bus speed. Without room for that
either, the job stays stopped until everything is saved.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping

from msgspec import Struct

from gpucr.driver.gpus import list_gpus
from gpucr.interposer.vault import Vaults
from gpucr.linux import memory
from gpucr.quantities import format_bytes

_LEFT_TO_THE_JOB = 16
"""Leave a sixteenth of what the job holds on a GPU free there: it may allocate while its memory is written."""

_LEAST_LEFT_BYTES = 256 << 20


class Way(enum.Enum):
    """Where the memory to write is."""

    ON_GPU = "on the GPU"
    CHANGES = "what changed, on the GPU or in host memory"
    IN_HOST_MEMORY = "in host memory"
    JOB_WAITS = "the job waits"


class Choice(Struct, frozen=True):
    """A way, and a sentence with the reason for it."""

    way: Way
    reason: str


SAVED_FIRST = Choice(Way.JOB_WAITS, "")
"""Without a choice everything is saved before the job continues, if it does."""


def choose(
    needed_bytes: Mapping[str, int],
    free_bytes: Mapping[str, int],
    host_free_bytes: int,
    *,
    after_first_pass: bool = False,
) -> Choice:
    """The best way for which there is room. What changes needs is only known once the job stands still.

    ``needed_bytes``: what the job holds and its interposers can take, per GPU UUID; ``free_bytes``: free there while it
    runs, beside gpucr's vaults. ``host_free_bytes``: of host memory, within cgroup limits.
    """
    total = sum(needed_bytes.values())
    tight = [uuid for uuid, needed in needed_bytes.items() if _with_reserve(needed) > free_bytes.get(uuid, 0)]
    if not tight:
        return Choice(Way.ON_GPU, f"a copy of {format_bytes(total)} stays on the GPU while it is written out")
    full = f"GPU {tight[0]} has {format_bytes(max(0, free_bytes.get(tight[0], 0)))} free beside gpucr's own context"
    if after_first_pass:
        return Choice(Way.CHANGES, f"only what differs from the first pass is copied: {full}")
    if _with_reserve(total) <= host_free_bytes:
        return Choice(
            Way.IN_HOST_MEMORY, f"a copy of {format_bytes(total)} goes to host memory and is written out there: {full}"
        )
    return Choice(
        Way.JOB_WAITS,
        f"the job stands still until {format_bytes(total)} are saved: {full}, "
        f"and {format_bytes(host_free_bytes)} of host memory are free",
    )


def _with_reserve(needed_bytes: int) -> int:
    return needed_bytes + _reserve(needed_bytes)


def _reserve(held_bytes: int) -> int:
    return max(held_bytes // _LEFT_TO_THE_JOB, _LEAST_LEFT_BYTES)


class Keeping:
    """The choice of one operation, for all of its interposed processes together.

    ``wait_saved`` waits until all their memory is saved: for what turns out to have no room. ``after_first_pass``: most
    of it may be saved already when they stand still.
    """

    chooses = True

    def __init__(self, vaults: Vaults, wait_saved: Callable[[], object]) -> None:
        self.wait_saved = wait_saved
        self.after_first_pass = False
        self.is_on_gpu = False
        self._vaults = vaults
        self._lock = threading.Lock()
        self._needed: dict[str, int] = {}
        self._free: dict[str, int] = {}
        self._on_host_bytes = 0
        self._choice: Choice | None = None
        self._job_waits = False

    def need(self, needed_bytes: Mapping[str, int]) -> None:
        """Register what a process holds per GPU UUID. All register before the first asks for the choice."""
        with self._lock:
            for uuid, size_bytes in needed_bytes.items():
                self._needed[uuid] = self._needed.get(uuid, 0) + size_bytes

    def choice(self) -> Choice:
        """Made once, while the job runs."""
        with self._lock:
            if self._choice is None:
                free = {gpu.uuid: gpu.memory_free_bytes - self._vaults.needed_bytes(gpu.uuid) for gpu in list_gpus()}
                self._free = free
                self._choice = choose(
                    self._needed, free, memory.available_bytes(), after_first_pass=self.after_first_pass
                )
            return self._choice

    def place(self, uuid: str, changed_bytes: int) -> Way:
        """Where this much that one process has changed on a GPU is kept, once the job stands still."""
        with self._lock:
            left_bytes = self._free.get(uuid, 0) - _reserve(self._needed.get(uuid, 0))
            if changed_bytes <= left_bytes:
                self._free[uuid] -= changed_bytes
                self.is_on_gpu = self.is_on_gpu or changed_bytes > 0
                return Way.ON_GPU
        return self.place_on_host(changed_bytes)

    def place_on_host(self, changed_bytes: int) -> Way:
        """As `place`, of what cannot be on one GPU."""
        with self._lock:
            if _with_reserve(changed_bytes) <= memory.available_bytes() - self._on_host_bytes:
                self._on_host_bytes += changed_bytes
                return Way.IN_HOST_MEMORY
            self._job_waits = True
            return Way.JOB_WAITS

    @property
    def job_waits(self) -> bool:
        """Whether the job must not run before all is saved."""
        return self._job_waits or (self._choice is not None and self._choice.way is Way.JOB_WAITS)


class KeepsNothing(Keeping):
    """For an operation that saves everything before the job continues, or lets the processes keep it."""

    chooses = False

    def __init__(self, vaults: Vaults) -> None:
        super().__init__(vaults, lambda: None)

    def choice(self) -> Choice:
        return SAVED_FIRST
