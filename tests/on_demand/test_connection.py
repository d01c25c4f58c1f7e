"""One connection, without a job."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from gpucr.on_demand import tasks
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


def test_tasks_that_are_cancelled_as_their_wait_ends_still_end() -> None:
    """`asyncio.wait_for` swallows that cancellation before Python 3.12."""

    async def run() -> int:
        loop, waits = asyncio.get_running_loop(), list[asyncio.Future[None]]()

        async def swallow() -> None:
            while True:
                waits.append(loop.create_future())
                with contextlib.suppress(*((asyncio.CancelledError,) if len(waits) == 1 else ())):
                    await waits[-1]

        task = loop.create_task(swallow())
        await asyncio.sleep(0)
        await tasks.end([task])
        assert task.cancelled()
        return len(waits)

    assert asyncio.run(run()) == 2


def test_how_tasks_end_is_nobodys_business() -> None:
    async def fail() -> None:
        raise ValueError

    async def run() -> None:
        await tasks.end([asyncio.get_running_loop().create_task(fail())])
        await tasks.end([])

    asyncio.run(run())
