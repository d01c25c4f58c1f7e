"""A supervisor's clock and stop signals: injected, so that tests need not wait."""

from __future__ import annotations

import signal
import threading
import time
from typing import Literal, Protocol

from gpucr import Cancellation

Wish = Literal["drain", "leave"]
"""``drain``: take a last dump, which ends the job, and exit. ``leave``: exit, and leave the job running."""

ORDERS: dict[Wish, signal.Signals] = {"drain": signal.SIGTERM, "leave": signal.SIGUSR1}
"""What gpucr sends to a supervisor: heard also by one whose parents ignored them."""


class Clock(Protocol):
    """The clock that a supervisor needs."""

    def now_s(self) -> float:
        """Monotonic seconds, unaffected by changes of the machine's clock."""

    def wall_s(self) -> float:
        """Seconds since 1970."""

    def wait(self, seconds: float, stop: Stop) -> None:
        """Return after this many seconds, or as soon as a stop is requested."""


class MachineClock:
    """The machine's clock."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def wait(self, seconds: float, stop: Stop) -> None:
        stop.wait(seconds)


class Stop:
    """A stop request to a supervisor, from a signal handler or another thread. The first one wins.

    ``cancel`` ends the current operation; ``cancel_last``, set by a second signal, the last dump.
    """

    def __init__(self) -> None:
        self.wish: Wish | None = None
        self.cancel = Cancellation()
        self.cancel_last = Cancellation()
        self._requested = threading.Event()

    def request(self, wish: Wish) -> None:
        """Request it."""
        if self.wish is not None:
            self.cancel_last.cancel("a second signal came")
            return
        self.wish = wish
        self.cancel.cancel("the supervisor was told to end")
        self._requested.set()

    def wait(self, seconds: float) -> None:
        """Wait until it is requested, or the time is up."""
        self._requested.wait(seconds)
