"""Ctrl-C, SIGTERM and a caller's cancellation while a job is being changed.

A signal handler that raises at an arbitrary instruction would cut a bookkeeping line in half. So a signal is only
noted, and acted on where it is safe: between two steps, and inside those long waits that say that they can be cut
off (`Interrupts.allowed`). During the undo, and once the operation has succeeded, it is told that it came too late.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from gpucr.errors import Interrupted
from gpucr.undo.cancellation import Cancellation

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

BRINGING_BACK = "the job is being brought back; this cannot be cut short"
TOO_LATE = "too late to interrupt: it is done"

_innermost: Interrupts | None = None
"""Of the main thread, the only one that signals reach."""


class Interrupts:
    """Context in which SIGINT, SIGTERM and SIGHUP, and ``cancel``, lead to one orderly undo.

    Signals reach only the main thread; elsewhere (gpucr called from another thread) the handlers stay as they are.
    ``on_ignored`` is called, with the reason, when a signal comes that changes nothing. ``cancel`` is looked at where
    `check` is called: long waits do so several times a second.

    Contexts nest: a command has one around everything that it does, an operation its own. When an operation is over,
    so is what is around it: a signal that comes while the command prints the report must not make a failure of a
    success. (A command that goes on after that says so: `not_over_yet`.) ``is_committed``: the point of no return is
    behind; ``is_done``: so is the last step; ``has_succeeded``: an operation inside has, whatever became of its report.
    """

    def __init__(self, on_ignored: Callable[[str], None] | None = None, *, cancel: Cancellation | None = None) -> None:
        self._by_signal = Cancellation()
        self._cancellations = (self._by_signal,) if cancel is None else (self._by_signal, cancel)
        self._error: BaseException | None = None
        self._raise_at_once = False
        self._undoing = False
        self._is_told = False
        self.is_committed = False
        self.is_done = False
        self._on_ignored = on_ignored
        self.has_succeeded = False
        self._outer: Interrupts | None = None
        self._is_innermost = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        global _innermost
        if threading.current_thread() is threading.main_thread():
            self._outer, _innermost, self._is_innermost = _innermost, self, True
            for number in _SIGNALS:
                # nohup and background jobs of a shell ignore signals on purpose: leave those alone. None stands
                # for a handler that is not Python's: it could not be put back.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _innermost
        if not self._is_innermost:
            return
        _innermost, self._is_innermost = self._outer, False
        if self._outer is not None:
            self._outer.has_succeeded = kind is None or self.is_done
            self._outer.commit()  # before its handlers are back: what comes in between must not be raised, either
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        """Whether a signal has come, or the caller has cancelled."""
        return any(each.is_cancelled for each in self._cancellations)

    def check(self) -> None:
        """Raise KeyboardInterrupt, with the reason, where a signal or ``cancel`` has come and something can be undone.

        Raises what `stop_with` was given instead, where that came.
        """
        if self._undoing or self.is_committed:
            return
        if self._error is not None:
            raise self._error
        if self.requested:
            raise KeyboardInterrupt(next(each.reason for each in self._cancellations if each.is_cancelled))

    def stop_with(self, error: BaseException) -> None:
        """Let the next `check` raise ``error``: for what goes wrong in another thread. The first one counts."""
        if self._error is None:
            self._error = error

    def raise_at_once(self) -> None:
        """From here on a signal raises KeyboardInterrupt, once: nothing has been changed yet."""
        self._raise_at_once = True
        self.check()  # after the line above: a signal that comes between the two is not missed

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let a signal raise KeyboardInterrupt at once: for a wait that cleans up after itself."""
        try:
            self.raise_at_once()
            yield
        finally:
            self._raise_at_once = False

    def postpone(self) -> None:
        """From here on nothing is cut off; `check` raises what came."""
        self._raise_at_once = False

    def commit(self) -> None:
        """The point of no return: what was asked for exists now. Neither a signal nor the deadline takes it back."""
        self.is_committed = True
        self._raise_at_once = False

    def conclude(self) -> None:
        """All steps are done: raise what `check` does for the last time, then `commit`."""
        self.check()
        self.commit()
        if self.requested and not self._is_told:  # it came in the last step, which cannot be cut off
            self._tell_too_late()

    @contextlib.contextmanager
    def undoing(self) -> Iterator[None]:
        """While the block lasts signals change nothing; `check` raises what came when it is over."""
        self._undoing = True
        self._raise_at_once = False
        try:
            yield
        finally:
            self._undoing = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._by_signal.cancel("interrupted")
        if self._undoing:
            self._tell(BRINGING_BACK)
        elif self.is_committed:
            self._tell_too_late()
        elif self._raise_at_once:
            self._raise_at_once = False  # a second signal must not cut off the cleaning up after the first
            raise KeyboardInterrupt

    def _tell_too_late(self) -> None:
        self._is_told = True
        self._tell(TOO_LATE)

    def _tell(self, reason: str) -> None:
        if self._on_ignored is not None:
            self._on_ignored(reason)


def interrupted(error: KeyboardInterrupt, state: str, *, hint: str | None = None) -> Interrupted:
    """The error for the caller. ``state``: what is true now."""
    return Interrupted(f"{str(error) or 'interrupted'}; {state}", hint=hint)


def not_over_yet() -> None:
    """For what goes on after an operation, with a question or another one: signals end it again, in the main thread."""
    if _innermost is not None and threading.current_thread() is threading.main_thread():
        _innermost.is_committed = _innermost.has_succeeded = False
        _innermost.raise_at_once()
