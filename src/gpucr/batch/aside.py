"""A call in a thread of its own, so that signals reach the main thread meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from gpucr import Cancellation

T = TypeVar("T")


class Aside(Generic[T]):
    """``call`` gets a cancellation, which the main thread may use."""

    def __init__(self, call: Callable[[Cancellation], T]) -> None:
        self.cancellation = Cancellation()
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._call = call
        self._thread = threading.Thread(target=self._work, name="batch")
        self._thread.start()

    def is_over(self, timeout_s: float = 0) -> bool:
        """Whether it has returned, now or within this time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def result(self) -> T:
        """What it has returned; raises what it has raised. Waits for it."""
        self._thread.join()
        if self._errors:
            raise self._errors[0]
        return self._results[0]

    def _work(self) -> None:
        try:
            self._results.append(self._call(self.cancellation))
        except BaseException as e:  # noqa: BLE001 - raised in the caller's thread
            self._errors.append(e)
