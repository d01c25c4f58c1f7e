"""Free the ports of a job that is about to be restored of what is left of closed connections."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection

from gpucr.linux import sock_diag
from gpucr.model import Endpoint

_POLL_S = 0.1


def free(endpoints: Collection[Endpoint], check: Callable[[], None]) -> None:
    """End the remnants at these ports where nobody has a socket; wait for their end where the kernel cannot.

    ``endpoints``: of signed images, so the job had sockets there. ``check`` raises to stop the wait.
    """
    with contextlib.suppress(OSError):
        sock_diag.destroy(sock_diag.left_over_at(endpoints))
    end = time.monotonic() + sock_diag.TIME_WAIT_LIMIT_S
    while sock_diag.left_over_at(endpoints) and time.monotonic() < end:
        check()
        time.sleep(_POLL_S)
