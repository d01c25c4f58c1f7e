"""The socket on which a forwarder answers others, and `gpucr jobs` (`neighbours.py`)."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable

from gpucr.on_demand.neighbours import MOST_BYTES, Message, address_of, message_in, user_of

_ASKED_LIMIT_S, _MOST_ASKERS = 5.0, 64

Answer = Callable[[Message, int], Awaitable[Message]]
"""Answers a message of a user's process."""


class Answering:
    """A forwarder's socket. Raises OSError if its name is taken."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._askers = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(address_of(os.getpid()))
            self._socket.listen(_MOST_ASKERS)
        except BaseException:
            self._socket.close()
            raise

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()
        try:
            while True:
                asker, _ = await loop.sock_accept(self._socket)
                if self._askers >= _MOST_ASKERS:
                    asker.close()
                    continue
                self._askers += 1
                task = loop.create_task(self._serve(asker))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            self._socket.close()
            for each in tasks:
                each.cancel()

    async def _serve(self, asker: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            message = await asyncio.wait_for(_line(loop, asker), _ASKED_LIMIT_S)
            answer = await self._answer(message, user_of(asker))
            await asyncio.wait_for(loop.sock_sendall(asker, json.dumps(answer).encode() + b"\n"), _ASKED_LIMIT_S)
        except (OSError, ValueError, asyncio.TimeoutError):
            pass  # who asks nonsense, or leaves, gets no answer
        finally:
            self._askers -= 1
            asker.close()


async def _line(loop: asyncio.AbstractEventLoop, asker: socket.socket) -> Message:
    text = b""
    while not text.endswith(b"\n") and len(text) < MOST_BYTES:
        piece = await loop.sock_recv(asker, MOST_BYTES)
        if not piece:
            break
        text += piece
    return message_in(text)
