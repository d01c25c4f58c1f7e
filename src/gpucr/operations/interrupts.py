"""Ctrl-C and SIGTERM while a job is being changed.

A signal handler that raises at an arbitrary instruction would cut a bookkeeping line in half. So a signal is only
noted, and acted on where it is safe: between two steps, and inside those long waits that say that they can be cut
off (`Interrupts.allowed`). During the undo it is noted and nothing else: undoing is what the user wants.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Context in which SIGINT, SIGTERM and SIGHUP lead to one orderly undo.

    Signals reach only the main thread; elsewhere (gpucr called from another thread) the handlers stay as they are.
    ``on_ignored`` is called when a signal comes while the undo is under way.
    """

    def __init__(self, on_ignored: Callable[[], None] | None = None) -> None:
        self.requested = False
        self._error: BaseException | None = None
        self._raise_at_once = False
        self._undoing = False
        self.is_committed = False
        self._on_ignored = on_ignored
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # nohup and background jobs of a shell ignore signals on purpose: leave those alone. None stands
                # for a handler that is not Python's: it could not be put back.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt where a signal has come since the start and there is something to undo.

        Raises what `stop_with` was given instead, where that came.
        """
        if self._undoing or self.is_committed:
            return
        if self._error is not None:
            raise self._error
        if self.requested:
            raise KeyboardInterrupt

    def stop_with(self, error: BaseException) -> None:
        """Let the next `check` raise ``error``: for what goes wrong in another thread. The first one counts."""
        if self._error is None:
            self._error = error

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let a signal raise KeyboardInterrupt at once: for a wait that cleans up after itself."""
        self._raise_at_once = True
        try:
            self.check()  # after the line above: a signal that comes between the two is not missed
            yield
        finally:
            self._raise_at_once = False

    def postpone(self) -> None:
        """From here to the end of the `allowed` wait nothing is cut off; `check` raises afterwards."""
        self._raise_at_once = False

    def commit(self) -> None:
        """The point of no return: what was asked for exists now. Neither a signal nor the deadline takes it back."""
        self.is_committed = True
        self._raise_at_once = False

    def begin_undo(self) -> None:
        """From here on signals change nothing."""
        self._undoing = True
        self._raise_at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._undoing:
            if self._on_ignored is not None:
                self._on_ignored()
            return
        self.requested = True
        if self._raise_at_once:
            self._raise_at_once = False  # a second signal must not cut off the cleaning up after the first
            raise KeyboardInterrupt
