"""A call in a thread of its own, so that signals reach the main thread meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from gpucr import Cancellation
from gpucr.linux.work import Work

T = TypeVar("T")


class Aside(Work[T]):
    """``call`` gets a cancellation, which the main thread may use."""

    def __init__(self, call: Callable[[Cancellation], T]) -> None:
        self.cancellation = Cancellation()
        super().__init__(partial(call, self.cancellation), "batch", daemon=False)
