"""The priority of gpucr's own threads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_FIRST = -20


@contextlib.contextmanager
def urgent() -> Iterator[None]:
    """During the block the calling thread comes before others that want a processor.

    For work that takes little of it, and that is no use late. Needs CAP_SYS_NICE or RLIMIT_NICE, else nothing changes.
    """
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, _FIRST)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, before)
