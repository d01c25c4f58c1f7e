"""Room in the machine's memory for TCP, while the data that waited in a job's connections comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TextIO

from gpucr.linux import tcp_memory
from gpucr.network.recovery import LowerTcpMemory
from gpucr.undo.protection import Protection

_WAIT_S = 10.0
"""For another restore that has raised the limits. Longer ones leave enough room, or CRIU says that there is none."""


@contextlib.contextmanager
def room_for(waiting_bytes: int, protection: Protection) -> Iterator[None]:
    """In the block the machine's connections take that many bytes more, if this process may raise their limits.

    Where it may not, in a container or for an ordinary user, CRIU says so if there is too little.
    """
    with contextlib.ExitStack() as raised:
        if waiting_bytes:
            with contextlib.suppress(OSError):
                _raise(raised, waiting_bytes, protection)
        yield


def _raise(raised: contextlib.ExitStack, waiting_bytes: int, protection: Protection) -> None:
    file = raised.enter_context(tcp_memory.opened_limits())
    if (now := tcp_memory.limits(file)) == tcp_memory.with_room(now, waiting_bytes):
        return
    tcp_memory.lock(file, _WAIT_S)
    before = tcp_memory.limits(file)
    after = tcp_memory.with_room(before, waiting_bytes)
    if after != before:
        protection.protect(LowerTcpMemory(before, after))
        raised.callback(protection.withdraw, LowerTcpMemory)
        raised.callback(_lower, file, before, after)
        tcp_memory.set_limits(file, after)


def _lower(file: TextIO, before: tcp_memory.Limits, after: tcp_memory.Limits) -> None:
    with contextlib.suppress(OSError):
        if tcp_memory.limits(file) == after:
            tcp_memory.set_limits(file, before)
