"""Background work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Work(Generic[T]):
    """A function that runs in its own thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._results: list[T] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="vault", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._results.append(work())
        except Exception as e:  # noqa: BLE001 - raised in the thread that waits
            self._error = e

    def wait(self) -> T:
        """Wait until it is done, and return its result. Raises its error."""
        results = self.results()
        if self._error is not None:
            raise self._error
        return results[0]

    def results(self) -> list[T]:
        """Wait until it is done. Its result; empty if it failed."""
        self._thread.join()
        return self._results
