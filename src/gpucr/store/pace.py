"""Whether compressing a piece saves time, for ``--compress auto``."""

from __future__ import annotations

import math
import threading

from gpucr.store.codec import Choice, Encoding

_WEIGHT = 1 / 16
_LOOK_EVERY = 128


class Pace:
    """Compares the measured time for compression with the time saved by writing less.

    Both are times of one thread, including waits. So threads compress while disk or network are the bottleneck, and
    stop when they no longer are: this settles where the dump is fastest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compressing: dict[Encoding, float] = {}
        self._writing: float | None = None
        self._asked = 0

    def pays(self, choice: Choice) -> bool:
        """Whether to compress a piece for which the sample suggests it."""
        with self._lock:
            self._asked += 1
            compressing = self._compressing.get(choice.encoding)
            if compressing is None:
                # One thread measures compression; the others write meanwhile, which must be measured too.
                self._compressing[choice.encoding] = math.inf
                return True
            # Occasionally in any case: a rate that is never measured would never change.
            if self._writing is None or self._asked % _LOOK_EVERY == 0:
                return True
            return compressing < choice.saved * self._writing

    def compressed(self, encoding: Encoding, size_bytes: int, seconds: float) -> None:
        """Record the time for compressing a piece of this size."""
        with self._lock:
            self._compressing[encoding] = _moved(self._compressing.get(encoding), seconds / size_bytes)

    def written(self, size_bytes: int, seconds: float) -> None:
        """Record the time for writing this many bytes."""
        with self._lock:
            self._writing = _moved(self._writing, seconds / size_bytes)


def _moved(average: float | None, value: float) -> float:
    return value if average is None or math.isinf(average) else average + _WEIGHT * (value - average)
