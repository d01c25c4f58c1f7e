"""Ctrl-C, SIGTERM and a caller's cancellation while a job is being changed.

A signal handler that raises at an arbitrary instruction would tear bookkeeping apart. So a signal is only noted, and
acted on where that is safe: between steps, and inside long waits that declare themselves interruptible
(`Interrupts.allowed`). During the undo, and once the operation has succeeded, it has no effect, and the user is told
so.
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
"""The main thread's contexts; signals reach no other thread."""


class Interrupts:
    """Context in which SIGINT, SIGTERM and SIGHUP, and ``cancel``, lead to one orderly undo.

    Signals reach only the main thread; elsewhere (gpucr called from another thread) the handlers stay as they are.
    ``on_ignored`` is called with the reason when a signal has no effect. `check` looks at ``cancel``; long waits call
    it several times a second.

    Contexts nest: a command has one around all that it does, an operation its own. When an operation is over, the outer
    context is over too: a signal while the command prints the report must not turn success into failure. (A command
    that continues after that calls `not_over_yet`.) ``is_committed``: past the point of no return; ``is_done``: past
    the last step; ``has_succeeded``: an inner operation succeeded, even if its report failed.
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
                # nohup and a shell's background jobs ignore signals on purpose: leave those alone. None means a handler
                # that is not Python's, which could not be restored.
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
            self._outer.commit()  # before its handlers are restored: a signal in between must not be raised either
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        """Whether a signal has come, or the caller has cancelled."""
        return any(each.is_cancelled for each in self._cancellations)

    def check(self) -> None:
        """Raise KeyboardInterrupt, with the reason, if a signal or ``cancel`` has come and something can be undone.

        Raises the error given to `stop_with` instead, if there is one.
        """
        if self._undoing or self.is_committed:
            return
        if self._error is not None:
            raise self._error
        if self.requested:
            raise KeyboardInterrupt(next(each.reason for each in self._cancellations if each.is_cancelled))

    def stop_with(self, error: BaseException) -> None:
        """Let the next `check` raise ``error``: for failures in another thread. The first one wins."""
        if self._error is None:
            self._error = error

    def raise_at_once(self) -> None:
        """From now on a signal raises KeyboardInterrupt, once: nothing has been changed yet."""
        self._raise_at_once = True
        self.check()  # after the line above, so that a signal between the two is not missed

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let a signal raise KeyboardInterrupt at once: for a wait that cleans up after itself."""
        try:
            self.raise_at_once()
            yield
        finally:
            self._raise_at_once = False

    def postpone(self) -> None:
        """From now on nothing is interrupted; `check` raises a noted signal."""
        self._raise_at_once = False

    def commit(self) -> None:
        """The point of no return: the result exists. Neither a signal nor the deadline undoes it."""
        self.is_committed = True
        self._raise_at_once = False

    def conclude(self) -> None:
        """All steps are done: `check` a last time, then `commit`."""
        self.check()
        self.commit()
        if self.requested and not self._is_told:  # it came in the last step, which cannot be interrupted
            self._report_too_late()

    @contextlib.contextmanager
    def undoing(self) -> Iterator[None]:
        """During the block signals have no effect; afterwards `check` raises a noted one."""
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
            self._report_too_late()
        elif self._raise_at_once:
            self._raise_at_once = False  # a second signal must not interrupt the cleanup after the first
            raise KeyboardInterrupt

    def _report_too_late(self) -> None:
        self._is_told = True
        self._tell(TOO_LATE)

    def _tell(self, reason: str) -> None:
        if self._on_ignored is not None:
            self._on_ignored(reason)


def interrupted(error: KeyboardInterrupt, state: str, *, hint: str | None = None) -> Interrupted:
    """The error for the caller. ``state``: the state of things now, in words."""
    return Interrupted(f"{str(error) or 'interrupted'}; {state}", hint=hint)


def not_over_yet() -> None:
    """For a command that continues after an operation, with a question or another one: signals interrupt it again."""
    if _innermost is not None and threading.current_thread() is threading.main_thread():
        _innermost.is_committed = _innermost.has_succeeded = False
        _innermost.raise_at_once()
