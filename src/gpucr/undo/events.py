"""What operations tell while they run: to the caller's ``on_progress``, and to all who have subscribed."""

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

    A phase begins, advances (bytes moved so far, and ``total_bytes`` that are expected), says something about itself
    (note), ends, or is undone; or a signal had to be ignored meanwhile. ``seconds`` counts from the phase's begin.
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
        """Seconds until the expected bytes are moved at this rate; None where nobody can know."""
        rate = self.rate_bytes_per_s
        if rate is None or self.total_bytes <= 0:
            return None
        return max(self.total_bytes - self.size_bytes, 0) / rate


class Event(Struct, frozen=True):
    """An operation begins, makes ``progress``, ends, or fails. For those who `subscribe`.

    ``operation`` is what was called (``dump``, ``prune``, ...), ``subject`` what it works on, as the caller named it;
    ``id`` tells operations of this process apart. ``seconds`` counts from the operation's begin. A failure has its
    ``error``, and the error's ``code`` where it is one of gpucr's.
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
        """The code of the error; None where there is none, or it is not one of gpucr's."""
        return self.error.code if isinstance(self.error, GpucrError) else None


OnProgress = Callable[[Progress], None]
OnEvent = Callable[[Event], None]

_subscribers: dict[int, OnEvent] = {}
_numbers = itertools.count(1)


def subscribe(on_event: OnEvent) -> Callable[[], None]:
    """Have ``on_event`` called with what every operation of this process does. Returns what ends that.

    It is called by the threads that do the work, by one at a time for each operation, and an operation waits for it.
    What it raises is shown by `sys.excepthook` and changes nothing: who only watches cannot make a dump fail.
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
    """Tells what one operation does: ``on_progress``, and the subscribers, one event at a time.

    An ``on_progress`` that fails ends an operation, but never an undo.
    """

    def __init__(self, on_progress: OnProgress | None, operation: str = "", subject: object = "") -> None:
        self._on_progress = on_progress
        self._operation = operation
        self._subject = str(subject)
        self._id = next(_numbers)
        self._start = time.monotonic()
        self._turn = threading.RLock()  # reentrant: a signal handler tells of an ignored signal, at any instruction
        self._untold: deque[Event] = deque()
        self._is_telling = False

    @property
    def is_heard(self) -> bool:
        """Whether anybody listens."""
        return self._on_progress is not None or bool(_subscribers)

    @contextlib.contextmanager
    def announced(self) -> Iterator[None]:
        """The operation is this block."""
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

        What a signal handler tells of while the listener is at work comes right after that: writing to a stream, say,
        fails inside another write to it.
        """
        self._tell("progress", progress)

    def tell_ignored(self, reason: str) -> None:
        """Of a signal that changes nothing."""
        self.try_to_tell(Progress("signal-ignored", "signal", reason))

    def try_to_tell(self, progress: Progress) -> None:
        """For an undo. A listener that exits the program is no reason to leave a job half-way, either."""
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
                    if self._untold:  # a handler may have told of it just before the line above
                        self._deliver(self._untold.popleft())
                finally:
                    self._is_telling = False

    def _deliver(self, event: Event) -> None:
        for subscriber in tuple(_subscribers.values()):
            subscriber(event)
        if event.progress is not None and self._on_progress is not None:
            self._on_progress(event.progress)
