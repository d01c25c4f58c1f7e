"""A network namespace of a test's own: its packet filter, ports and connections are nobody else's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from gpucr.linux import namespaces, nftables


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """The calling thread, and what it starts, is in a new one during the block. Needs root.

    What `tests.command.run` starts is not: it is forked by a process that was there before.
    """
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        namespaces.make_new("net")
        namespaces.bring_loopback_up()
        yield
    finally:
        namespaces.enter(before, "net")
        os.close(before)


def filters() -> tuple[str, ...]:
    """The tables of the caller's network namespace."""
    with nftables.opened() as connection:
        return nftables.tables(connection)
