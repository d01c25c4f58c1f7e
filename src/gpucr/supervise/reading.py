"""Between checkpoints: read again what the next dumps rely on, which need not do it then."""

from __future__ import annotations

import contextlib
import threading

from gpucr import Cancellation, Secret
from gpucr.errors import GpucrError
from gpucr.model import CHECK_KNOWN_S
from gpucr.operations.stores import verify_snapshots

PACE = 0.1
"""The share of the time in which it reads: the job reads and writes too."""


class Reading:
    """Reads a snapshot in the background. What a dump would have to read soon is read early."""

    def __init__(self, snapshot: str, key: Secret | None) -> None:
        """Begin. ``snapshot``: STORE#NAME."""
        self._snapshot = snapshot
        self._key = key
        self._cancel = Cancellation()
        self._thread = threading.Thread(target=self._read, name="reading", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        # What is damaged is found by the next dump, which stores it again.
        with contextlib.suppress(GpucrError, OSError, KeyboardInterrupt):
            verify_snapshots(
                self._snapshot,
                deep=True,
                older_than_s=CHECK_KNOWN_S / 2,
                pace=PACE,
                key=self._key,
                cancel=self._cancel,
            )

    def end(self) -> None:
        """Stop. What was read until then is on record. Idempotent."""
        self._cancel.cancel()
        self._thread.join()
