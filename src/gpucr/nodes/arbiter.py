"""Node 0 decides which nodes let their GPU work go for a moment, until all hold theirs at once (holding.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from gpucr.linux.priority import urgent

_PATIENCE_S, _MOST_PATIENCE_S = 0.02, 0.5
"""If nothing changes for so long, those that hold their work are in the way. A lock alone takes 0.2 to 3 ms."""
_GROWS_BY = 1.2
_LOOK_EVERY_S = 0.002


class Arbiter:
    """A thread of node 0. ``held``: by node, the ``times`` of its last word; it changes under ``changed``.

    ``let_go`` is called with the new number of times, and ``all_held`` once, both without the lock.
    """

    def __init__(
        self,
        count: int,
        changed: threading.Condition,
        held: Mapping[int, int],
        is_over: Callable[[], bool],
        let_go: Callable[[int], None],
        all_held: Callable[[], None],
    ) -> None:
        self._count, self._changed, self._held = count, changed, held
        self._is_over, self._let_go, self._all_held = is_over, let_go, all_held

    def start(self) -> None:
        """Work until all is held, or the meeting is over."""
        threading.Thread(target=self._work, name="nodes-arbiter", daemon=True).start()

    def _work(self) -> None:
        with urgent():
            self._decide()

    def _decide(self) -> None:
        times, patience_s, seen, since = 0, _PATIENCE_S, 0, time.monotonic()
        while True:
            with self._changed:
                if self._is_over():
                    return
                held = sum(each == times for each in self._held.values())
                if held < self._count:
                    self._changed.wait(_LOOK_EVERY_S)
                    held = sum(each == times for each in self._held.values())
            now = time.monotonic()
            if held == self._count:
                self._all_held()
                return
            if held != seen:
                seen, since = held, now
            elif held and now - since > patience_s:
                times, seen, since = times + 1, 0, now
                patience_s = min(patience_s * _GROWS_BY, _MOST_PATIENCE_S)
                self._let_go(times)
