"""A program on its own pseudo-terminal, and what a person would see there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

import pyte
import pytest

from tests.counter import DEADLINE_S

TERM = "linux"
"""What pyte understands."""


class Terminal:
    """Runs a command in a session of its own, with this terminal as its controlling one."""

    def __init__(self, command: list[str], *, columns: int = 120, lines: int = 30, env_term: str = TERM) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.modes_before = termios.tcgetattr(slave)
        self.raw = b""
        self._slave = slave
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._is_closed = False
        # setsid(1) of util-linux becomes the command: it takes its stdin for the controlling terminal.
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": env_term, "LC_ALL": "C.UTF-8"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._lock = threading.Lock()
        self._reader.start()

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self.master, keys.encode())

    def wait_read(self) -> None:
        """Wait until the program has read what was typed."""
        deadline = time.monotonic() + DEADLINE_S
        while struct.unpack("i", fcntl.ioctl(self._slave, termios.FIONREAD, bytes(4)))[0]:
            assert time.monotonic() < deadline, "the program reads no keys"
            time.sleep(0.01)

    def text(self) -> str:
        """What is on the screen now."""
        with self._lock:
            return "\n".join(self._screen.display)

    def cells(self) -> list[list[tuple[str, str, bool, bool]]]:
        """The screen now, row by row: the character of each column, its colour, whether bold, and whether reverse."""
        with self._lock:
            rows = [[line[column] for column in range(self._screen.columns)] for line in self._rows()]
        return [[(cell.data, cell.fg, cell.bold, cell.reverse) for cell in row] for row in rows]

    def _rows(self) -> list[Any]:
        return [self._screen.buffer[number] for number in range(self._screen.lines)]

    def wait_for(self, condition: str | Callable[[str], bool], what: str | None = None) -> str:
        """Wait until the screen shows this, wherever its lines are broken (at a longer pid, say), and return it."""
        deadline = time.monotonic() + DEADLINE_S
        shows = condition if callable(condition) else lambda text: " ".join(condition.split()) in " ".join(text.split())
        while True:
            code = self.process.poll()
            if code is not None:
                self._wait_drained()  # what it said last may not have been read yet
            text = self.text()
            if shows(text):
                return text
            if time.monotonic() > deadline or code is not None:
                ended = f"; it ended with {code}" if code is not None else ""
                pytest.fail(f"waited without success for {what or condition!r}{ended}; the screen:\n{text}")
            time.sleep(0.01)

    def resize(self, columns: int, lines: int) -> None:
        """Another size, which the kernel reports to the program (SIGWINCH)."""
        with self._lock:
            self._screen.resize(lines, columns)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_ended(self) -> int:
        """Wait for the program's end, read what it said last, and return its exit code."""
        code = self.process.wait(DEADLINE_S)
        self._wait_drained()
        return code

    def _wait_drained(self) -> None:
        while select.select([self.master], [], [], 0)[0]:
            time.sleep(0.01)
        with self._lock:  # the last of it is on the screen
            return

    @property
    def modes(self) -> list[Any]:
        """The terminal's settings (termios(3))."""
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        """Kill what still runs and give the terminal back."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(DEADLINE_S)
        self.hang_up()

    def hang_up(self) -> None:
        """Close the terminal, as when a connection breaks."""
        if not self._is_closed:
            self._is_closed = True
            self._reader.join(DEADLINE_S)
            os.close(self._slave)
            os.close(self.master)

    def _read(self) -> None:
        while not self._is_closed:
            if select.select([self.master], [], [], 0.05)[0]:
                with self._lock:  # so that nothing has been read and is not on the screen yet
                    data = os.read(self.master, 1 << 16)
                    self.raw += data
                    self._stream.feed(data)
