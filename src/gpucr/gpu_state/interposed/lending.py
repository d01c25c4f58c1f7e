"""Device memory that gpucr holds beside running programs makes way as soon as a call of one finds none."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Callable

from gpucr.interposer.client import Agent


class Lending:
    """Between `lend` and `end` a call that finds no memory waits until ``let_go`` has returned, and is made again.

    ``let_go`` frees everything that is held, on all GPUs; it is called once, by another thread.
    """

    def __init__(self, let_go: Callable[[], None]) -> None:
        self._let_go = let_go
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, name="lending", daemon=True)
        self.was_called = False

    def lend(self, agent: Agent) -> None:
        """From now on this process may ask for it, until its agent is hung up on. Raises as `Agent`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._sockets.append(ours)
            self._selector.register(ours, selectors.EVENT_READ, ours)
            agent.lend(theirs.fileno())
        if self._thread.ident is None:
            self._thread.start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._wake or key.fd == self._wake:
                    return
                asking: socket.socket = key.data
                if self._is_asked(asking):
                    self.was_called = True
                    with contextlib.suppress(Exception):  # what cannot be freed is reported where it is used
                        self._let_go()
                    self._close_all()
                    return
                self._selector.unregister(key.fileobj)

    @staticmethod
    def _is_asked(asking: socket.socket) -> bool:
        """False: the process has ended, or its agent was hung up on."""
        try:
            return bool(asking.recv(1))
        except OSError:
            return False

    def _close_all(self) -> None:
        while self._sockets:
            self._sockets.pop().close()

    def end(self) -> None:
        """Nothing is held any more. Idempotent."""
        if self._woken < 0:
            return
        os.close(self._woken)
        self._woken = -1
        if self._thread.ident is not None:
            self._thread.join()
        self._close_all()
        self._selector.close()
        os.close(self._wake)
