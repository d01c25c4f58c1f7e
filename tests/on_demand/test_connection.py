"""One connection, without a job."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from gpucr.on_demand.connection import Connection, NotServed

PIECES = 100


class Served:
    """A forwarder whose job takes everything."""

    http = False

    def __init__(self) -> None:
        self.job, self.far = socket.socketpair()
        self.job.setblocking(False)

    async def admit(self, connection: Connection) -> None:
        """At once."""

    async def to_job(self, job_port: int) -> socket.socket:
        """Its end of a pair."""
        return self.job

    def passed(self, connection: Connection, *, from_client: int = 0, to_client: int = 0) -> None:
        """Nothing."""

    def refused(self, reason: NotServed) -> None:
        """Never."""
        raise AssertionError(reason)


def test_a_fast_stream_does_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither side ever has to be waited for, nothing but the forwarder itself lets others run."""

    async def run() -> list[str]:
        loop, served = asyncio.get_running_loop(), Served()
        client, far = socket.socketpair()
        order: list[str] = []

        async def receive(source: socket.socket, size: int) -> bytes:
            if source is not served.job or order.count("piece") == PIECES:
                return b""
            order.append("piece")
            return b"x"

        async def send(sink: socket.socket, data: Any) -> None:
            """At once."""

        async def another() -> None:
            for _ in range(PIECES // 2):
                order.append("another")
                await asyncio.sleep(0)

        monkeypatch.setattr(loop, "sock_recv", receive)
        monkeypatch.setattr(loop, "sock_sendall", send)
        with far, served.far:
            await asyncio.gather(Connection(served, client, 1).run(), another())
        return order

    order = asyncio.run(run())
    assert order.count("piece") == PIECES
    assert len(order) - 1 - order[::-1].index("another") < PIECES + 10
