"""GPU work of a job on several nodes, held everywhere at once.

A rank that is held submits nothing, so a collective that its peer on another node has submitted never ends, and the
peer's lock stays pending: it is *ahead*. Each node holds its own ranks (gang/hold_leader.py) and says so. While some
nodes hold theirs and others do not, node 0 has the former let go for a moment, again and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gpucr.errors import DeadlineExceeded
from gpucr.gang.holdable import Others
from gpucr.nodes.meeting import Meeting

_LOOK_EVERY_S = 0.002


class HeldTogether(Others):
    """This node's view of it. One operation, one hold.

    ``deadline``: for all nodes to begin; ``limit_s``: how long it may take then.
    """

    def __init__(self, meeting: Meeting, deadline: float, limit_s: float) -> None:
        self._meeting = meeting
        self._deadline = deadline
        self._limit_s = limit_s
        self._said = -1
        """The ``times`` of what was said last."""

    def begin(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until all nodes are about to hold their work, calling ``check``. Raises NodeFailed, DeadlineExceeded."""
        with self._meeting.checking(check):
            self._meeting.together("holding", self._deadline)
        self._deadline = min(self._deadline, time.monotonic() + self._limit_s)

    @property
    def end(self) -> float:
        """The time.monotonic() value by which the work of all nodes has to be held."""
        return self._deadline

    def are_held(self) -> bool | None:
        """Say that this node's work is held. True: all nodes' is. None: let it go for a moment, and hold it again."""
        times = self._meeting.times_let_go
        if self._meeting.is_all_held:
            return True
        if self._said < 0 or self._said == times:
            if self._said < 0:
                self._said = times
                self._meeting.held(times)
            return False
        self._said = -1
        return None

    def came_late(self) -> None:
        """This node's work is not held any more, or not yet."""
        self._said = -1

    def wait(self) -> None:
        """For a moment, or until something changes."""
        self._meeting.wait_for_news(_LOOK_EVERY_S)

    def hold_nothing(self) -> None:
        """For a node whose part has no GPU work: wait until all others hold theirs. Raises as `begin`."""
        self.begin()
        while self.are_held() is not True:
            self._meeting.require_going_on()
            if time.monotonic() > self._deadline:
                raise self.too_late()
            self.wait()

    def too_late(self) -> DeadlineExceeded:
        """The error of a node whose work is held, but too late."""
        return DeadlineExceeded(
            "timed out before the GPU work of all other nodes was held",
            hint="see what they say; check that all ranks make progress, or allow more time",
        )
