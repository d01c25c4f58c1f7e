"""How a test talks to the counters of a container: over the network that they share, or through files."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Protocol

from tests.counter import DEADLINE_S, wait_until


class Talk(Protocol):
    """Questions to counters, each known by its port."""

    def ask(self, port: int, text: str) -> str:
        """The answer of a counter. To what comes while the process is stopped it is given later."""
        ...

    def answers(self, port: int) -> bool:
        """Whether the counter answers now, or soon."""
        ...


class ByPacket:
    """Over UDP, as the counter does it."""

    def ask(self, port: int, text: str) -> str:
        return _exchange(port, text, DEADLINE_S)

    def answers(self, port: int) -> bool:
        try:
            return bool(_exchange(port, "pid", 0.5))
        except OSError:
            return False


class ByFile:
    """Through files in the counters' working folder, for a CRIU that cannot dump sockets (`--by-file`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ask(self, port: int, text: str) -> str:
        answer = self._folder / f"{port}.answer"
        answer.unlink(missing_ok=True)
        unasked = self._folder / f"{port}.unasked"
        unasked.write_text(text)
        unasked.rename(self._folder / f"{port}.ask")
        wait_until(answer.exists, f"the answer of counter {port}")
        return answer.read_text()

    def answers(self, port: int) -> bool:
        return bool(self.ask(port, "pid"))


def _exchange(port: int, text: str, timeout_s: float) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(("127.0.0.1", port))
        connection.send(text.encode())
        return connection.recv(4096).decode().strip()
