"""Background work."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Work:
    """A function that runs in its own thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="vault", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as e:  # noqa: BLE001 - raised in the thread that waits
            self._error = e

    def wait(self) -> None:
        """Wait until it is done. Raises its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
