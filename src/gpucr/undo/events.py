"""Events of running operations, for the caller's ``on_progress`` and for all subscribers."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

from msgspec import Struct

from gpucr.errors import GpucrError


class Progress(Struct, frozen=True):
    """An event for ``on_progress``.

    A phase begins, advances (bytes moved so far, of the expected ``total_bytes``), has a note about itself, ends, or is
    undone; or a signal had to be ignored. ``seconds`` counts from the start of the phase.
    """

    event: Literal["begin", "advance", "note", "end", "undo", "signal-ignored"]
    phase: str
    description: str = ""
    seconds: float = 0.0
    size_bytes: int = 0
    total_bytes: int = 0

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Bytes per second since the phase began; None while none have been moved."""
        return self.size_bytes / self.seconds if self.size_bytes > 0 and self.seconds > 0 else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until the expected bytes are moved at this rate; None if unknown."""
        rate = self.rate_bytes_per_s
        if rate is None or self.total_bytes <= 0:
            return None
        return max(self.total_bytes - self.size_bytes, 0) / rate


class Event(Struct, frozen=True):
    """An operation begins, makes ``progress``, ends, or fails. For those who `subscribe`.

    ``operation`` is what was called (``dump``, ``prune``, ...), ``subject`` what it works on, as the caller named it;
    ``id`` is unique in this process. ``seconds`` counts from the start of the operation. A failure has its ``error``,
    and the error's ``code`` if it is one of gpucr's.
    """

    kind: Literal["begin", "progress", "end", "fail"]
    operation: str
    subject: str
    id: int
    seconds: float
    progress: Progress | None = None
    error: BaseException | None = None

    @property
    def code(self) -> str | None:
        """The code of the error; None if there is none, or it is not one of gpucr's."""
        return self.error.code if isinstance(self.error, GpucrError) else None


OnProgress = Callable[[Progress], None]
OnEvent = Callable[[Event], None]

_subscribers: dict[int, OnEvent] = {}
_numbers = itertools.count(1)


def subscribe(on_event: OnEvent) -> Callable[[], None]:
    """Call ``on_event`` with the events of every operation of this process. Returns a function that ends that.

    The threads that do the work call it, one at a time per operation, and the operation waits for it. What it raises
    goes to `sys.excepthook` and changes nothing: an observer cannot make a dump fail.
    """

    def careful(event: Event) -> None:
        try:
            on_event(event)
        except Exception as error:  # noqa: BLE001 - see above
            sys.excepthook(type(error), error, error.__traceback__)

    number = next(_numbers)
    _subscribers[number] = careful
    return lambda: _subscribers.pop(number, None) and None


class Listener:
    """Reports one operation to ``on_progress`` and the subscribers, one event at a time.

    A failing ``on_progress`` ends an operation, but never an undo.
    """

    def __init__(self, on_progress: OnProgress | None, operation: str = "", subject: object = "") -> None:
        self._on_progress = on_progress
        self._operation = operation
        self._subject = str(subject)
        self._id = next(_numbers)
        self._start = time.monotonic()
        self._turn = threading.RLock()  # reentrant: a signal handler reports an ignored signal, at any instruction
        self._untold: deque[Event] = deque()
        self._is_telling = False

    @property
    def is_heard(self) -> bool:
        """Whether there is a listener."""
        return self._on_progress is not None or bool(_subscribers)

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """The block is the operation."""
        with contextlib.suppress(BaseException):
            self._tell("begin")
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(BaseException):
                self._tell("fail", error=error)
            raise
        with contextlib.suppress(BaseException):
            self._tell("end")

    def tell(self, progress: Progress) -> None:
        """Raises what ``on_progress`` raises.

        An event from a signal handler is delivered after the one in progress: writing to a stream, for example, fails
        inside another write to it.
        """
        self._tell("progress", progress)

    def report_ignored(self, reason: str) -> None:
        """Report a signal that changes nothing."""
        self.try_to_report(Progress("signal-ignored", "signal", reason))

    def try_to_report(self, progress: Progress) -> None:
        """For an undo. Not even a listener that exits the program may leave a job midway."""
        with contextlib.suppress(BaseException):
            self.tell(progress)

    def _tell(
        self,
        kind: Literal["begin", "progress", "end", "fail"],
        progress: Progress | None = None,
        error: BaseException | None = None,
    ) -> None:
        if not self.is_heard:
            return
        seconds = time.monotonic() - self._start
        event = Event(kind, self._operation, self._subject, self._id, seconds, progress, error)
        with self._turn:
            self._untold.append(event)
            while self._untold and not self._is_telling:
                self._is_telling = True
                try:
                    if self._untold:  # a handler may have reported it just before the line above
                        self._deliver(self._untold.popleft())
                finally:
                    self._is_telling = False

    def _deliver(self, event: Event) -> None:
        for subscriber in tuple(_subscribers.values()):
            subscriber(event)
        if event.progress is not None and self._on_progress is not None:
            self._on_progress(event.progress)
