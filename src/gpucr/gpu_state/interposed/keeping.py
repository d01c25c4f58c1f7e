"""How a job's device memory stays what it was while the job runs on: what a dump with leave-running writes out.

Where there is room for it, memory that comes back to an interposed process is renewed on the GPU, and what it was
before stays there for gpucr to read: that takes no time to speak of. Else it is copied to host memory at the speed of
the bus. Where there is no room for that either, the job stands still until all of it is saved.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Mapping

from msgspec import Struct

from gpucr.interposer.vault import Vaults
from gpucr.linux import memory
from gpucr.quantities import format_bytes

_LEFT_TO_THE_JOB = 16
"""A sixteenth of what the job holds on a GPU stays free there: it may ask for more while its memory is written out."""

_LEAST_LEFT_BYTES = 256 << 20


class Way(enum.Enum):
    """Where the memory is that is written out."""

    ON_GPU = "on the GPU"
    IN_HOST_MEMORY = "in host memory"
    JOB_WAITS = "the job waits"


class Choice(Struct, frozen=True):
    """A way, and the sentence that says why it is this one."""

    way: Way
    reason: str


def choose(needed_bytes: Mapping[str, int], free_bytes: Mapping[str, int], host_free_bytes: int) -> Choice:
    """The best way that there is room for.

    ``needed_bytes``: what the job holds that its interposers can take, per GPU UUID, ``free_bytes`` what is free there
    while it runs and gpucr's vaults have started. ``host_free_bytes``: of host memory, under the limits of cgroups.
    """
    total = sum(needed_bytes.values())
    tight = [uuid for uuid, needed in needed_bytes.items() if _with_reserve(needed) > free_bytes.get(uuid, 0)]
    if not tight:
        return Choice(Way.ON_GPU, f"a copy of {format_bytes(total)} stays on the GPU while it is written out")
    full = f"GPU {tight[0]} has {format_bytes(free_bytes.get(tight[0], 0))} free"
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
    return needed_bytes + max(needed_bytes // _LEFT_TO_THE_JOB, _LEAST_LEFT_BYTES)


class Keeping:
    """The choice of one operation, for all of its interposed processes together.

    ``wait_saved`` waits until all that was taken out of them is saved: for what turns out to have had no room.
    """

    def __init__(self, vaults: Vaults, wait_saved: Callable[[], object]) -> None:
        self.wait_saved = wait_saved
        self._vaults = vaults
        self._lock = threading.Lock()
        self._needed: dict[str, int] = {}
        self._choice: Choice | None = None

    def need(self, needed_bytes: Mapping[str, int]) -> None:
        """A process holds so much per GPU UUID. All of them say so before the first one asks for the choice."""
        with self._lock:
            for uuid, size_bytes in needed_bytes.items():
                self._needed[uuid] = self._needed.get(uuid, 0) + size_bytes

    def choice(self) -> Choice:
        """Made once, while the job runs. Raises VaultFailed where a GPU has no room for gpucr itself."""
        with self._lock:
            if self._choice is None:
                free = {uuid: self._vaults.of(uuid).free_bytes() for uuid, needed in self._needed.items() if needed}
                self._choice = choose(self._needed, free, memory.available_bytes())
            return self._choice

    @property
    def job_waits(self) -> bool:
        """Whether the job must not run before all is saved."""
        return self._choice is not None and self._choice.way is Way.JOB_WAITS
