"""Ending operations from elsewhere: another thread, a signal, a batch system that wants the machine."""

from __future__ import annotations


class Cancellation:
    """Ends the operations that were given it as ``cancel=``, in an orderly way. It stays cancelled.

    An operation takes notice between two steps and inside its long waits, undoes what it has done, and raises
    Interrupted. One that has reached its result by then succeeds; one that is begun later raises at once, with nothing
    changed. One object may be given to any number of operations.
    """

    def __init__(self) -> None:
        self._reason: str | None = None

    def cancel(self, reason: str = "cancelled") -> None:
        """From any thread, and from a signal handler. The first ``reason`` counts: it begins the error's message."""
        if self._reason is None:  # of two at once either may be the first
            self._reason = reason

    @property
    def reason(self) -> str | None:
        """Why; None where it was not cancelled."""
        return self._reason

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._reason is not None
