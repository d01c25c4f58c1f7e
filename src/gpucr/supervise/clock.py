"""A supervisor's time, and the signals that it gets: passed in, so that tests need not wait."""

from __future__ import annotations

import threading
import time
from typing import Literal, Protocol

from gpucr.undo.cancellation import Cancellation

Wish = Literal["drain", "leave"]
"""``drain``: take a last dump, which ends the job, and end. ``leave``: end, and leave the job running."""


class Clock(Protocol):
    """The time that a supervisor needs."""

    def now_s(self) -> float:
        """Seconds that only grow, also when the machine's clock is set."""

    def wall_s(self) -> float:
        """Seconds since 1970."""

    def wait(self, seconds: float, stop: Stop) -> None:
        """Return after so many seconds, or as soon as a stop is requested."""


class MachineClock:
    """The machine's."""

    def now_s(self) -> float:
        """CLOCK_MONOTONIC."""
        return time.monotonic()

    def wall_s(self) -> float:
        """CLOCK_REALTIME."""
        return time.time()

    def wait(self, seconds: float, stop: Stop) -> None:
        """Wait for the stop."""
        stop.wait(seconds)


class Stop:
    """That a supervisor is to end, from a signal handler or another thread. The first wish counts.

    ``cancel`` ends what it is doing at the time, ``cancel_last`` the last dump: a second signal does.
    """

    def __init__(self) -> None:
        self.wish: Wish | None = None
        self.cancel = Cancellation()
        self.cancel_last = Cancellation()
        self._requested = threading.Event()

    def request(self, wish: Wish) -> None:
        """Ask for it."""
        if self.wish is not None:
            self.cancel_last.cancel("a second signal came")
            return
        self.wish = wish
        self.cancel.cancel("the supervisor was told to end")
        self._requested.set()

    def wait(self, seconds: float) -> None:
        """Wait until it is requested, at most so long."""
        self._requested.wait(seconds)
