"""Connections of strangers to a server: a limited number, from a limited number of places, each for a limited time."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

_AT_LEAST_S = 1.0
"""How long a connection is left alone. A newcomer takes the place of an older one that has not finished."""

_SITE_BITS = 64
"""The part of an IPv6 address that names a site; whoever has one has all its addresses."""


class Visitors:
    """At most ``most`` connections, and ``most_of_one`` from one place: an IPv4 address, or an IPv6 site.

    Each is ended after ``limit_s``, however often something arrives meanwhile. If there are too many, the oldest is
    ended; if that has just come, the newcomer is turned away.
    """

    def __init__(self, most: int, most_of_one: int, limit_s: float) -> None:
        self._most, self._most_of_one, self._limit_s = most, most_of_one, limit_s
        self._changing = threading.Lock()
        self._inside: dict[socket.socket, tuple[str, float]] = {}  # where it is from, and since when: the oldest first

    def admit(self, connection: socket.socket, address: str) -> bool:
        """Whether it may come in; then `served` must follow."""
        place = place_of(address)
        with self._changing:
            found = self._in_the_way(place)
            if found is not None:
                if time.monotonic() - self._inside[found][1] < _AT_LEAST_S:
                    return False
                self._end(found)
            self._inside[connection] = place, time.monotonic()
        return True

    @contextlib.contextmanager
    def served(self, connection: socket.socket) -> Iterator[None]:
        """The block in which an admitted connection is served.

        Raises TimeoutError at its end if the connection was ended meanwhile.
        """
        timer = threading.Timer(self._limit_s, self._end_late, (connection,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._changing:
                was_inside = self._inside.pop(connection, None) is not None
        if not was_inside:
            raise TimeoutError("it took too long")

    def _in_the_way(self, place: str) -> socket.socket | None:
        """The connection whose place a newcomer needs; None: there is room."""
        counts = Counter(each for each, _ in self._inside.values())
        if counts[place] < self._most_of_one:
            if len(self._inside) < self._most:
                return None
            place = counts.most_common(1)[0][0]
        return next(each for each, (from_where, _) in self._inside.items() if from_where == place)

    def _end_late(self, connection: socket.socket) -> None:
        with self._changing:
            if connection in self._inside:
                self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        """All reads and writes of it end, in any thread. It is still to be closed."""
        del self._inside[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def place_of(address: str) -> str:
    """The place that a numeric address belongs to."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, _SITE_BITS), strict=False))
