"""What keeps a rank from submitting work, and can be released for a moment."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from gpucr.driver.api import Driver
from gpucr.errors import LockTimeout
from gpucr.model import CudaState

MAX_LOCK_TIMEOUT_MS = (1 << 32) - 1
"""CUcheckpointLockArgs.timeoutMs has 32 bits."""


class Holdable(Protocol):
    """A rank that can be held: by the driver's lock, by a gate before its calls, or by both.

    A waiting hold must already keep the rank from submitting more: a rank that is ahead stays where it is while the
    others catch up. Each method is called by one thread at a time.
    """

    @property
    def pid(self) -> int:
        """Identifies it in errors and results."""
        ...

    @property
    def pending(self) -> str:
        """What the process was still doing when the last hold ran out of time."""
        ...

    def hold(self, timeout_s: float) -> bool:
        """Released → held, once nothing that it submitted is pending. False: out of time, and it is released.

        Raises if it can neither be held nor is known to be released.
        """
        ...

    def release(self) -> None:
        """Held → released."""
        ...

    @property
    def is_held(self) -> bool:
        """Whether it is held now; called when a release has failed."""
        ...


class Others(Protocol):
    """Ranks of the same job that somebody else holds, on other nodes, and that ours may wait for."""

    def begin(self, check: Callable[[], None]) -> None:
        """Wait until all are about to be held. May raise; ``check`` is called often meanwhile, and may raise too."""
        ...

    @property
    def end(self) -> float:
        """The time.monotonic() value by which all have to be; known once they have begun."""
        ...

    def are_held(self) -> bool | None:
        """Ours are held: whether all others are too. None: they wait for ours, so release these for a moment."""
        ...

    def came_late(self) -> None:
        """Ours are not held any more."""
        ...

    def wait(self) -> None:
        """For a moment, or until `are_held` may have another answer."""
        ...

    def too_late(self) -> Exception:
        """The error if ours are held, and it is too late."""
        ...


class DriverLock:
    """A process that the driver locks (see `Holdable`): RUNNING is released, LOCKED is held."""

    def __init__(self, driver: Driver, pid: int) -> None:
        self._driver = driver
        self._pid = pid

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def pending(self) -> str:
        """All that the driver reports."""
        return "had GPU work pending"

    def hold(self, timeout_s: float) -> bool:
        """RUNNING → LOCKED. Raises DriverError."""
        # Rounded up: a lock that times out before the end would be requested again for nothing.
        timeout_ms = max(1, math.ceil(min(timeout_s * 1000, MAX_LOCK_TIMEOUT_MS)))
        try:
            self._driver.lock(self._pid, timeout_ms)
        except LockTimeout:
            return False
        return True

    def release(self) -> None:
        """LOCKED → RUNNING. Raises DriverError."""
        self._driver.unlock(self._pid)

    @property
    def is_held(self) -> bool:
        """Whether it is LOCKED. Raises DriverError."""
        return self._driver.state(self._pid) is CudaState.LOCKED
