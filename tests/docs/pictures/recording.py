"""A session on a terminal, recorded: what was on the screen, and when.

The commands run on the simulated driver, in namespaces of their own, as those of the pages do (sessions.py); only root
can record. Everything on the screen was printed by the programs.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs import sessions
from tests.terminal import TERM, Terminal

SNAPSHOTS = Path("/var/snapshots")
"""Where the pages keep snapshots. A recording makes it, and removes it."""

HOME = Path("/srv/ada")
"""Where the shell is at home: in memory, and seen by no other program."""

_LOOKS_PER_S = 8
_PROMPT = "# "


@dataclass(frozen=True)
class Run:
    """Characters of one look; ``colour`` is one of pyte's names."""

    text: str
    colour: str = "default"
    bold: bool = False
    reverse: bool = False


Row = tuple[Run, ...]


@dataclass(frozen=True)
class Frame:
    """The screen from one moment on, in seconds since the recording began."""

    at_s: float
    rows: tuple[Row, ...]


class Camera:
    """A shell on a terminal, and what was seen of it."""

    def __init__(self, terminal: Terminal) -> None:
        self.frames: list[Frame] = []
        self._terminal = terminal
        self._is_on = threading.Event()
        self._over = threading.Event()
        self._began_s = 0.0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def type(self, command: str, wait: bool = True) -> None:
        """Type a command, and wait for the next prompt."""
        self._terminal.press(command)
        self.see(command)
        self._terminal.press("\n")
        if wait:
            self._terminal.wait_for(_is_at_prompt, f"the end of {command!r}")
        self.rest()

    def press(self, keys: str, shows: str) -> None:
        """Press keys of a program that has the whole terminal, and wait until it shows something."""
        self._terminal.press(keys)
        self.see(shows)
        self.rest()

    def see(self, words: str) -> None:
        """Wait until they are on the screen, and were recorded."""
        wanted = "".join(words.split())
        self._terminal.wait_for(lambda text: wanted in "".join(text.split()), repr(words))  # also over two lines
        self.rest(2 / _LOOKS_PER_S)

    def rest(self, seconds: float = 0.6) -> None:
        """Let those who look read."""
        self._over.wait(seconds)

    def roll(self) -> None:
        """Record from now on."""
        self._began_s = time.monotonic()
        self._is_on.set()

    def stop(self) -> None:
        """Record no more."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(1 / _LOOKS_PER_S):
            if self._is_on.is_set():
                rows = tuple(_row(line) for line in self._terminal.cells())
                if not self.frames or self.frames[-1].rows != rows:
                    self.frames.append(Frame(time.monotonic() - self._began_s, rows))


def _is_at_prompt(text: str) -> bool:
    return f"\n{text}".rstrip().endswith("\n#")


def _row(line: list[tuple[str, str, bool, bool]]) -> Row:
    """Neighbours of one look are one run; blanks at the end are left out."""
    runs: list[Run] = []
    for data, colour, bold, reverse in line:
        if runs and (runs[-1].colour, runs[-1].bold, runs[-1].reverse) == (colour, bold, reverse):
            runs[-1] = Run(runs[-1].text + data, colour, bold, reverse)
        else:
            runs.append(Run(data, colour, bold, reverse))
    while runs and not runs[-1].reverse and not runs[-1].text.strip():
        runs.pop()
    if runs and not runs[-1].reverse:
        last = runs.pop()
        runs.append(Run(last.text.rstrip(), last.colour, last.bold, last.reverse))
    return tuple(runs)


@contextlib.contextmanager
def shell(columns: int, lines: int, before: tuple[str, ...] = ()) -> Iterator[Camera]:
    """A shell in which the simulated driver is in place, and ``before`` was typed; the recording begins after that."""
    SNAPSHOTS.mkdir()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            home = Path(scratch) / "home"
            home.mkdir()
            environment = {**sessions.environment(home), "HOME": str(HOME), "PS1": _PROMPT, "TERM": TERM}
            environment["LC_ALL"] = "C.UTF-8"
            begin = f"""{shlex.join([sys.executable, "-c", sessions.BEGIN])} && mount -t tmpfs none {HOME.parent} &&
                mkdir {HOME} && cd {HOME} && exec bash --norc --noprofile"""
            given = [f"{name}={value}" for name, value in environment.items()]
            terminal = Terminal(["env", "-i", *given, *sessions.ALONE, "sh", "-c", begin], columns=columns, lines=lines)
            camera = Camera(terminal)
            try:
                terminal.wait_for(_is_at_prompt, "the first prompt")
                for command in ('eval "$(gpucr sim env --state-dir $HOME/gpus)"', *before, "clear"):
                    camera.type(command)
                camera.roll()
                yield camera
                camera.rest(1)
                camera.stop()
            finally:
                terminal.close()
    finally:
        shutil.rmtree(SNAPSHOTS)
