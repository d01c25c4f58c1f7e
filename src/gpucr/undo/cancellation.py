"""Cancel operations from elsewhere: another thread, a signal, a batch system that wants the machine."""

from __future__ import annotations


class Cancellation:
    """Cancels the operations that got it as ``cancel=``, in an orderly way. It stays cancelled.

    An operation checks it between steps and inside long waits, undoes what it has done, and raises Interrupted. An
    operation that has reached its result by then succeeds; one started later raises at once, with nothing changed. One
    object may be passed to any number of operations.
    """

    def __init__(self) -> None:
        self._reason: str | None = None

    def cancel(self, reason: str = "cancelled") -> None:
        """Callable from any thread and from a signal handler.

        The first ``reason`` wins: it begins the error's message.
        """
        if self._reason is None:  # if two come at once, either may be the first
            self._reason = reason

    @property
    def reason(self) -> str | None:
        """The reason; None if it was not cancelled."""
        return self._reason

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._reason is not None
