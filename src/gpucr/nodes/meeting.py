"""A meeting of all nodes: each reports its steps, and hears when all have reached one; a failure reaches all at once.

Node 0 is the host, to which all others, the guests, have a connection. A meeting decides nothing: decisions are in the
store. It makes nodes wait for each other, and stop early if they can no longer succeed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Literal, TypeVar

from gpucr.errors import DeadlineExceeded, NodeFailed
from gpucr.nodes.rendezvous import Rendezvous
from gpucr.nodes.wire import Channel, Failed
from gpucr.undo.cancellation import Cancellation

Side = TypeVar("Side", bound="Meeting")
Step = Literal["placed", "agreed", "holding", "frozen", "imaged", "saved", "complete", "ready"]
Answer = Callable[[Sequence[str]], Sequence[str]]
"""What each node is told, from what each has said."""
LAST_STEPS = frozenset({"complete", "ready"})
"""Once all are there, a node that leaves changes nothing for the others."""
HELD = "held"
"""Said by node 0 alone: the work of all nodes is."""
LOOK_S = 0.1
_MOST_TEXT = 1500


class Joined(Cancellation):
    """Cancelled by itself, or with another one."""

    def __init__(self, other: Cancellation | None) -> None:
        super().__init__()
        self._other = other

    @property
    def reason(self) -> str | None:
        """Its own, or that of the other."""
        return self._reason or (self._other.reason if self._other is not None else None)

    @property
    def is_cancelled(self) -> bool:
        return self.reason is not None


class Meeting(ABC):
    """One side of it; a context manager, which tells the others if it ends by an exception.

    ``cancellation`` is cancelled as soon as another node fails, and with the caller's ``cancel``; ``error`` says how.
    """

    def __init__(self, rendezvous: Rendezvous, cancel: Cancellation | None) -> None:
        self.rendezvous = rendezvous
        self.cancellation = Joined(cancel)
        self.error: NodeFailed | None = None
        self._changed = threading.Condition()
        self._is_over = False
        self._check: Callable[[], None] = lambda: None
        self._times = 0
        self._is_all_held = False
        self._words: deque[tuple[int, str]] = deque()

    @abstractmethod
    def arrive(self, choose: Callable[[], str]) -> str:
        """Wait until all nodes are here. Returns the set id from ``choose``, called on node 0.

        Raises NodeFailed if one is not here in time.
        """

    @abstractmethod
    def exchange(self, step: Step, value: str, answer: Answer, deadline: float) -> str:
        """Wait until all nodes have reached the step, each with a value. Returns what node 0's ``answer`` has for this.

        What ``answer`` raises, node 0 raises, and has failed. Raises NodeFailed, DeadlineExceeded.
        """

    def together(self, step: Step, deadline: float) -> None:
        """Wait until all nodes have reached the step. Raises NodeFailed, DeadlineExceeded."""
        self.exchange(step, "", lambda values: [""] * len(values), deadline)

    @abstractmethod
    def tell(self, text: str) -> None:
        """Say something to node 0; node 0 says it to all others. Nobody hears it whose connection is lost."""

    def heard(self) -> list[tuple[int, str]]:
        """What others have said since the last call, in the order in which it came, with their numbers."""
        with self._changed:
            found = list(self._words)
            self._words.clear()
        return found

    @property
    @abstractmethod
    def own_address(self) -> str | None:
        """This node's address, as the others reach it; None if there is no other."""

    @abstractmethod
    def held(self, times: int) -> None:
        """All GPU work of this node is held, after it was let go so often (holding.py). Raises NodeFailed."""

    @property
    def times_let_go(self) -> int:
        """How often nodes were to let their work go."""
        return self._times

    @property
    def is_all_held(self) -> bool:
        """Whether the work of all nodes is held."""
        return self._is_all_held

    @abstractmethod
    def fail(self, why: str) -> None:
        """Tell all other nodes that this one has failed."""

    def conclude(self) -> None:
        """It is decided: from here on a node that fails or leaves changes nothing for the others."""
        with self._changed:
            self._is_over = True

    @abstractmethod
    def close(self) -> None:
        """End the connections."""

    def __enter__(self: Side) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._is_over and self.error is None:
            self.fail(getattr(error, "message", "") or str(error) or "it was interrupted")
        self._is_over = True
        self.close()

    @contextlib.contextmanager
    def checking(self, check: Callable[[], None]) -> Iterator[None]:
        """Call this often in the block while it waits; what it raises ends the wait."""
        self._check = check
        try:
            yield
        finally:
            self._check = lambda: None

    def require_going_on(self) -> None:
        """Raises NodeFailed if another node has failed, KeyboardInterrupt if this is cancelled."""
        if self.error is not None:
            raise self.error
        if self.cancellation.is_cancelled:
            raise KeyboardInterrupt(self.cancellation.reason)

    def wait_for_news(self, timeout_s: float) -> None:
        """Wait until something has changed, but not for long."""
        with self._changed:
            if not self._is_all_held:
                self._changed.wait(timeout_s)

    # --- for its two kinds ----------------------------------------------------------------------------------------

    def _hear(self, node: int, text: str) -> None:
        with self._changed:
            self._words.append((node, text))
            self._changed.notify_all()

    def _lose(self, error: NodeFailed) -> bool:
        """Record another node's failure. Returns whether it is the first, in a meeting that is not over."""
        with self._changed:
            if self._is_over or self.error is not None:
                return False
            self.error = error
            self._changed.notify_all()
        self.cancellation.cancel(error.message)
        return True

    def _wait(self, is_so: Callable[[], bool], deadline: float, late: Callable[[], Exception]) -> None:
        with self._changed:
            while not is_so():
                self.require_going_on()
                self._check()
                if time.monotonic() > deadline:
                    raise late()
                self._changed.wait(LOOK_S)


def node_failed(failed: Failed) -> NodeFailed:
    """The error for another node's failure message."""
    name = "another node" if failed.node is None else f"node {failed.node}"
    return NodeFailed(
        f"{name} failed: {failed.why}", node=failed.node, hint=f"{name} has said more where it was started"
    )


def lost(node: int) -> NodeFailed:
    """The error for a connection that has ended."""
    return NodeFailed(
        f"the connection to node {node} was lost: its gpucr, or the whole node, has ended",
        node=node,
        hint="see what it printed; try again when the node is there",
    )


def too_late(step: Step, nodes: str) -> DeadlineExceeded:
    """The error for a timeout while others are not ready."""
    words = {
        "placed": "said where its part is",
        "agreed": "agreed on addresses",
        "holding": "begun to hold its GPU work",
        "frozen": "frozen its part",
        "imaged": "saved its processes",
        "saved": "saved its part",
        "complete": "completed the set",
    }
    return DeadlineExceeded(
        f"timed out before {nodes} had {words.get(step, 'restored its part')}",
        hint="give a longer --timeout, or see what that node does",
    )


def as_text(why: str) -> str:
    """Truncate text to fit into a message."""
    return why[:_MOST_TEXT]


def tell(channel: Channel, failed: Failed) -> None:
    """Send it if still possible."""
    with contextlib.suppress(OSError):
        channel.send(failed)
