"""Signals that announce the end of an allocation."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any


class EndNotice:
    """Whether a signal has announced the end of the allocation."""

    def __init__(self, signals: Collection[signal.Signals]) -> None:
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}
        self._raises = False
        self.reason: str | None = None

    def __enter__(self) -> EndNotice:
        self._before = {number: signal.signal(number, self._take) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """The first signal during the block raises KeyboardInterrupt."""
        self._raises = True
        yield
        self._raises = False

    def _take(self, number: int, _frame: FrameType | None) -> None:
        is_first, self.reason = self.reason is None, self.reason or signal.Signals(number).name
        if self._raises and is_first:
            raise KeyboardInterrupt(self.reason)
