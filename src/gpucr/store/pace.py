"""Whether compressing a piece saves time: what ``--compress auto`` asks."""

from __future__ import annotations

import math
import threading

from gpucr.store.codec import Choice, Encoding

_WEIGHT = 1 / 16
_LOOK_EVERY = 128


class Pace:
    """Compares the time that compression takes with the time that writing less saves, as seen so far.

    Both are times of one thread, waiting included. So while the disk or the network holds the threads up, they
    compress, and when they compress so much that it no longer does, they stop: the two meet where the dump is fastest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compressing: dict[Encoding, float] = {}
        self._writing: float | None = None
        self._asked = 0

    def pays(self, choice: Choice) -> bool:
        """Whether to compress a piece for which this was advised."""
        with self._lock:
            self._asked += 1
            compressing = self._compressing.get(choice.encoding)
            if compressing is None:
                # One thread finds out; the others write meanwhile, which has to be measured too.
                self._compressing[choice.encoding] = math.inf
                return True
            # Now and then regardless: a rate that is no longer measured would never change.
            if self._writing is None or self._asked % _LOOK_EVERY == 0:
                return True
            return compressing < choice.saved * self._writing

    def compressed(self, encoding: Encoding, size_bytes: int, seconds: float) -> None:
        """So long took the compression of a piece of this size."""
        with self._lock:
            self._compressing[encoding] = _moved(self._compressing.get(encoding), seconds / size_bytes)

    def written(self, size_bytes: int, seconds: float) -> None:
        """So long took it to write so many bytes."""
        with self._lock:
            self._writing = _moved(self._writing, seconds / size_bytes)


def _moved(average: float | None, value: float) -> float:
    return value if average is None or math.isinf(average) else average + _WEIGHT * (value - average)
