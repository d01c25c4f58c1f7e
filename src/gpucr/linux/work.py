"""Work in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Work(Generic[T]):
    """A function that runs in its own thread. ``daemon``: the process may end before it."""

    def __init__(self, work: Callable[[], T], name: str, *, daemon: bool = True) -> None:
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=daemon)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._results.append(work())
        except BaseException as e:  # noqa: BLE001 - raised in the thread that waits
            self._error = e

    def is_done(self, within_s: float = 0) -> bool:
        """Wait for its end, but not longer than this."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

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
