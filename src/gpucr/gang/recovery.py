"""Put threads back where they were if gpucr died while CRIU was at work on them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from gpucr.linux.noted_threads import decode, put_back
from gpucr.undo.recovery import Action


class PutBackThreads(Action):
    """Put back the threads of stopped processes that a CRIU was killed in. The descriptor is a file with the notes."""

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Put them back. A process that has ended, or cannot be traced, stays as it is."""
        for fd in descriptors:
            for each in decode(os.pread(fd, os.fstat(fd).st_size, 0)):
                with contextlib.suppress(OSError):
                    put_back(each)
        return False
