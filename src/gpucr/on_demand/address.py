"""Where a forwarder listens, and to which port of its job it passes on what comes: text in, values out."""

from __future__ import annotations

import os
import re

from msgspec import Struct

from gpucr.errors import InvalidRequest
from gpucr.quantities import whole_number

_LONGEST_PATH = 107
"""sun_path of unix(7), without its end."""
_UNIX, _LOOPBACK = "unix:", "127.0.0.1"
_TCP = re.compile(r"(?:(?P<host>\[[^\]]*\]|[^\[\]:]*):)?(?P<port>\d{1,5})(?::(?P<job_port>\d{1,5}))?", re.ASCII)


class Address(Struct, frozen=True):
    """``host`` and ``port``, or the ``path`` of a Unix socket. ``job_port``: the job's, on its own loopback."""

    job_port: int
    host: str = _LOOPBACK
    port: int = 0
    path: str | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"{_UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def text(self) -> str:
        """What `parse` makes into this address, from any working folder."""
        return f"{self}:{self.job_port}"


def parse(text: str) -> Address:
    """Read ``[HOST:]PORT[:JOBPORT]`` or ``unix:PATH:JOBPORT``. IPv6 addresses are in brackets. Raises InvalidRequest.

    Without a HOST it is the loopback address: whoever may reach a model from outside is the user's decision.
    """
    if text.startswith(_UNIX):
        path, _, digits = text.removeprefix(_UNIX).rpartition(":")
        if not path or whole_number(digits) is None:
            raise _wrong(text, "name the socket and the job's port")
        path = os.path.abspath(path)
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise _wrong(text, f"the path of a Unix socket has at most {_LONGEST_PATH} bytes")
        return Address(_port(text, digits), path=path)
    found = _TCP.fullmatch(text)
    if found is None:
        raise _wrong(text, "name a port")
    host, ports = found["host"], [found["port"], *filter(None, [found["job_port"]])]
    if host is not None and whole_number(host) is not None and len(ports) == 1:  # `8000:8001` has no host
        host, ports = None, [host, *ports]
    if host is not None and not host.strip("[]"):
        raise _wrong(text, "the host is empty")
    return Address(_port(text, ports[-1]), (host or _LOOPBACK).strip("[]"), _port(text, ports[0]))


def parse_all(texts: tuple[str, ...]) -> tuple[Address, ...]:
    """All of them. Raises InvalidRequest also for one that is named twice."""
    found = tuple(map(parse, texts))
    for number, each in enumerate(found):
        if str(each) in map(str, found[:number]):
            raise InvalidRequest(f"{each} is named twice", hint="name every address once", code="GPUCR-ADDRESS")
    return found


def _port(text: str, digits: str) -> int:
    number = whole_number(digits)
    if number is None or not 1 <= number < 1 << 16:
        raise _wrong(text, f"{digits} is not a port: 1 to 65535")
    return number


def _wrong(text: str, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"{text!r} is not an address to listen on: {why}",
        hint="write 8000, 0.0.0.0:8000, [::1]:8000:9000 (the job listens on 9000) or unix:/run/llama.sock:9000",
        code="GPUCR-ADDRESS",
    )
