"""What the nodes of a job do next, decided in one place: on node 0, which may be the only one.

Nodes tell what happens to them (`News`), and all get the same `Order`. Nothing here waits or looks at a clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from gpucr.records import Count, Record

PAUSE_S = 2.0
"""Between a failed dump and the next attempt."""
_OTHERS_S = 30.0
"""How long the other nodes' parts may take to end by themselves, once one has failed."""
_MOST_TEXT = 1600
"""Of a message as it is sent. All of it has 2000 characters at most."""

Kind = Literal["runs", "leave", "dumped", "failed", "ended", "over"]


class News(Record, frozen=True):
    """What has happened on a node.

    ``runs``: its part was started. ``leave``: its place is about to end (``text``), by a signal if ``number``.
    ``dumped``, ``failed``: attempt ``number`` is over there. ``ended``: its part has, with this exit code. ``over``: it
    has to end, with this code.
    """

    kind: Kind
    number: Count = 0
    text: str = ""


class Order(Record, frozen=True):
    """What all nodes do.

    ``start``: from the set ``text``, or from scratch. ``dump``: attempt ``number``, within ``limit_s``. ``stop``: give
    this attempt up. ``made``: it has succeeded, so earlier snapshots go. ``over``: end what still runs, and exit with
    ``number``; ``by_itself``: the job has ended, and nobody ended it, perhaps after the signal ``text``.
    """

    kind: Literal["start", "dump", "stop", "made", "over"]
    number: Count = 0
    text: str = ""
    leave_running: bool = False
    limit_s: float | None = None
    by_itself: bool = False


@dataclass
class _Attempt:
    number: int
    leave_running: bool
    is_stopped: bool
    results: dict[int, bool]


class Rules:
    """The state of the job, by what its nodes have told. ``next_start`` says what that would continue from."""

    def __init__(
        self,
        node_count: int,
        *,
        every_s: float | None,
        grace_s: float,
        checkpoint_exit: int | None,
        requeue_exit: int,
        next_start: Callable[[], str],
    ) -> None:
        self._count = node_count
        self._every_s = every_s
        self._grace_s = grace_s
        self._checkpoint_exit = checkpoint_exit
        self._requeue_exit = requeue_exit
        self._next_start = next_start
        self._running: set[int] = set()
        self._ended: dict[int, int] = {}
        self._others_until = float("inf")
        self._attempt: _Attempt | None = None
        self._attempts = 0
        self._due = self._not_before = float("-inf")
        self._until = float("inf")
        self._over: Order | None = None
        self._leaving: str | None = None
        """Why the job leaves its place."""
        self._signal: str | None = None
        """The signal that said so."""

    def take(self, node: int, news: News, now: float) -> None:
        """A node has told this."""
        if news.kind == "runs":
            self._running.add(node)
            self._due = now + (self._every_s or 0)
        elif news.kind == "leave":
            if self._leaving is None:
                self._leaving, self._until = news.text, now + self._grace_s
            if news.number and self._signal is None:
                self._signal = news.text
        elif news.kind in ("dumped", "failed"):
            if self._attempt is not None and self._attempt.number == news.number:
                self._attempt.results[node] = news.kind == "dumped"
        elif news.kind == "ended":
            self._ended[node] = news.number
            if news.number:
                self._others_until = min(self._others_until, now + _OTHERS_S)
        else:
            self.end(news.number, self._of_node(node, news.text))

    def end(self, code: int, text: str) -> None:
        """Decide that it is over, and whether it has to be started again."""
        if code == self._requeue_exit:
            text = f"{text}: {self._next_start()}"
        self._over = self._over or Order("over", code, cut(text))

    def requeue(self, text: str) -> None:
        """Decide that it is over here, and has to be started again."""
        self.end(self._requeue_exit, text)

    def decide(self, now: float) -> Sequence[Order]:
        """What all do now, in this order. Nothing follows ``over``."""
        orders: list[Order] = []
        if self._over is None:
            orders = self._next_step(now) if self._attempt is None else self._look_at(self._attempt, now)
        return orders if self._over is None else [*orders, self._over]

    def _look_at(self, attempt: _Attempt, now: float) -> list[Order]:
        if len(attempt.results) < self._count:
            if self._leaving is None or not attempt.leave_running or attempt.is_stopped:
                return []
            attempt.is_stopped = True  # there is no time for it any more
            return [Order("stop", attempt.number, self._leaving)]
        self._attempt = None
        self._due = now + (self._every_s or 0)
        if not any(attempt.results.values()):
            self._not_before = now if attempt.leave_running else now + PAUSE_S
            return []
        if not attempt.leave_running:  # if one could not end its part, its processes are ended now
            code = self._checkpoint_exit if self._leaving is None else None
            self._over = Order("over", self._requeue_exit if code is None else code)
        return [Order("made")]

    def _next_step(self, now: float) -> list[Order]:
        failed = next((code for code in self._ended.values() if code != 0), 0)
        can_dump = len(self._running) == self._count and not self._ended
        if len(self._ended) == self._count or (failed and now >= self._others_until):
            self._over = Order("over", failed, self._signal or "", by_itself=True)
        elif self._leaving is not None:
            if now >= self._until:
                self.requeue("the job could not be dumped in time, and is ended")
            elif can_dump and now >= self._not_before:
                return [self._begin(leave_running=False, limit_s=self._until - now, text=self._leaving)]
        elif self._every_s is not None and can_dump and now >= self._due:
            return [self._begin(leave_running=self._checkpoint_exit is None)]
        return []

    def _begin(self, *, leave_running: bool, limit_s: float | None = None, text: str = "") -> Order:
        self._attempts += 1
        self._attempt = _Attempt(self._attempts, leave_running, is_stopped=False, results={})
        return Order("dump", self._attempts, text, leave_running, limit_s)

    def _of_node(self, node: int, text: str) -> str:
        return text if self._count == 1 else f"node {node}: {text}"


def cut(text: str) -> str:
    """Short enough for a message, and without what UTF-8 cannot have, such as the bytes of a file's name."""
    found = text[:_MOST_TEXT].encode(errors="backslashreplace").decode()
    while len(json.dumps(found)) > _MOST_TEXT:
        found = found[: len(found) * 3 // 4]
    return found
