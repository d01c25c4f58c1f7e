"""Copy the job's output to the batch system's log."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

_LOOK_EVERY_S = 0.2
_PIECE_BYTES = 1 << 16


class Relay:
    """Copies new lines of the job's log to stdout during the block, and the rest at its end."""

    def __init__(self, log: Path, position: int) -> None:
        """``position``: earlier output is from an earlier start. Raises OSError."""
        self._fd = os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._position = position
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="relay", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        os.close(self._fd)

    def _follow(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.wait(_LOOK_EVERY_S)  # asked before the last look at the file
            while piece := os.pread(self._fd, _PIECE_BYTES, self._position):
                self._position += len(piece)
                try:
                    sys.stdout.buffer.write(piece)
                    sys.stdout.buffer.flush()
                except OSError:  # no reader, or the disk of the batch system's log is full: the job keeps running
                    return
            self._position = min(self._position, os.fstat(self._fd).st_size)
