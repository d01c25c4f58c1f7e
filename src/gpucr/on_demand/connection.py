"""One client's connection: bytes both ways at the pace of the slower side, and what is said if the job cannot be woken.

Sockets of the event loop without streams: what one side does not take is not read from the other, an end of one side
is passed on as it is (half-closed), and an idle connection has no buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from typing import Protocol

from gpucr.on_demand.tasks import end as end_tasks
from gpucr.on_demand.traffic import HttpTraffic, PlainTraffic, Traffic

PIECE_BYTES = 1 << 20
"""With 256 KiB a byte costs half as much processor time more. splice(2) costs as much as these (both measured)."""
_REFUSAL_S, _MOST_UNREAD_BYTES = 1.0, 1 << 20


class NotServed(Exception):
    """The job does not answer this request. ``kind`` is a word for metrics; ``retry_s``: when to try again."""

    def __init__(self, kind: str, why: str, retry_s: float = 1.0) -> None:
        super().__init__(why)
        self.kind, self.why, self.retry_s = kind, why, retry_s


class Served(Protocol):
    """The forwarder, as its connections see it."""

    http: bool

    async def admit(self, connection: Connection) -> None:
        """Return when the job takes new requests. Raises NotServed."""

    async def to_job(self, job_port: int) -> socket.socket:
        """A connection to the job. Raises NotServed."""

    def passed(self, connection: Connection, *, from_client: int = 0, to_client: int = 0) -> None:
        """Bytes have come from one side."""

    def refused(self, reason: NotServed) -> None:
        """A request was not served."""


class Connection:
    """A client's socket, and the job's once there is one. Closes both."""

    def __init__(self, served: Served, client: socket.socket, job_port: int) -> None:
        self.traffic: Traffic | None = None
        self._served = served
        self._client = client
        self._job: socket.socket | None = None
        self._job_port = job_port
        self._loop = asyncio.get_running_loop()

    def is_open(self, now_s: float) -> bool:
        """Whether it has an open request."""
        return self.traffic is not None and self.traffic.is_open(now_s)

    def is_over(self, now_s: float, limit_s: float) -> bool:
        """Whether its open request has had no byte from the job for so long."""
        return self.traffic is not None and self.traffic.is_open(now_s) and self.traffic.silent_s(now_s) > limit_s

    async def run(self, refusal: NotServed | None = None) -> None:
        """Serve it to its end, or refuse it."""
        try:
            if refusal is not None:
                raise refusal
            await self._run()
        except NotServed as reason:
            self._served.refused(reason)
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self._refuse(reason), _REFUSAL_S)
        except OSError:
            pass  # one side has broken it off: so does this
        finally:
            self._client.close()
            if self._job is not None:
                self._job.close()

    def shut(self) -> None:
        """Break it off."""
        for each in (self._client, self._job):
            if each is not None:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    async def _run(self) -> None:
        first = b""
        if self._served.http:  # there, nobody is woken for a connection that asks nothing
            first = await self._loop.sock_recv(self._client, PIECE_BYTES)
            if not first:
                return
        await self._served.admit(self)
        now_s = time.monotonic()
        self.traffic = HttpTraffic() if self._served.http else PlainTraffic(now_s)
        if first:
            self.traffic.asked(first, now_s)
        self._served.passed(self, from_client=len(first))
        self._job = await self._served.to_job(self._job_port)
        if first:
            await self._loop.sock_sendall(self._job, first)
        await self._both_ways(self._job, self.traffic)

    async def _both_ways(self, job: socket.socket, traffic: Traffic) -> None:
        """Until both have ended, or one has failed."""
        ways = [
            self._loop.create_task(self._from_client(job, traffic)),
            self._loop.create_task(self._to_client(job, traffic)),
        ]
        try:
            await asyncio.gather(*ways)
        finally:
            await end_tasks(ways)

    async def _from_client(self, job: socket.socket, traffic: Traffic) -> None:
        while data := await self._loop.sock_recv(self._client, PIECE_BYTES):
            if traffic.begins_one(time.monotonic()):
                await self._served.admit(self)
            traffic.asked(data, time.monotonic())
            self._served.passed(self, from_client=len(data))
            await self._loop.sock_sendall(job, data)
            await asyncio.sleep(0)
        job.shutdown(socket.SHUT_WR)

    async def _to_client(self, job: socket.socket, traffic: Traffic) -> None:
        while data := await self._loop.sock_recv(job, PIECE_BYTES):
            traffic.answered(data, time.monotonic())
            self._served.passed(self, to_client=len(data))
            await self._loop.sock_sendall(self._client, data)
            await asyncio.sleep(0)  # others too: where both sides are fast, none of these waits
        self._client.shutdown(socket.SHUT_WR)

    async def _refuse(self, reason: NotServed) -> None:
        """Say why, with HTTP, and let the client read it: a close with unread bytes would discard it (tcp(7))."""
        if self._served.http:
            await self._loop.sock_sendall(self._client, response(reason))
        self._client.shutdown(socket.SHUT_WR)
        left_bytes = _MOST_UNREAD_BYTES
        while left_bytes > 0 and (data := await self._loop.sock_recv(self._client, PIECE_BYTES)):
            left_bytes -= len(data)


def turn_away(client: socket.socket, reason: NotServed, *, http: bool) -> None:
    """Refuse a connection at once, without waiting for its client to read that."""
    with contextlib.suppress(OSError):
        if http:
            client.send(response(reason))
        client.shutdown(socket.SHUT_WR)
    client.close()


def response(reason: NotServed) -> bytes:
    """503 Service Unavailable (RFC 9110), with the reason as text."""
    body = f"{reason.why}\n".encode()
    head = (
        "HTTP/1.1 503 Service Unavailable",
        f"Retry-After: {max(math.ceil(reason.retry_s), 1)}",
        "Content-Type: text/plain; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join((*head, "", "")).encode() + body
