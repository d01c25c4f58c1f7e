"""Progress on a terminal: the running phase has a live line, earlier ones stay with their times."""

from __future__ import annotations

import sys
import time

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from gpucr.cli.output import printable
from gpucr.cli.progress import how_far, talk_line
from gpucr.undo.events import Progress

BAR_WIDTH = 20
WIDTH_FOR_BAR = 80
"""Below this width only the figures fit."""
REFRESHES_PER_S = 10.0


class _Line(Live):
    """A live line with the cursor at its beginning: the ^C that a terminal shows there would else begin a new one."""

    def refresh(self) -> None:
        """Draw it."""
        super().refresh()
        self.console.file.write("\r")
        self.console.file.flush()


class LiveProgress:
    """Shows each running phase: a spinner and its time, and the bytes that it has moved, with their rate.

    If it is known how many there will be, a bar and the time left instead of the time.
    """

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._spinner = Spinner("line")
        self._live: _Line | None = None
        self._began = 0.0
        self._latest = Progress("begin", "")

    def __call__(self, progress: Progress) -> None:
        """Take an event."""
        if progress.event == "begin":
            self._begin(progress)
        elif progress.event == "advance":
            self._latest = progress
        elif progress.event == "end":
            self._leave(
                f"{progress.seconds:.1f} s" + (f", {how_far(progress)}" if progress.size_bytes else ""), "green"
            )
        elif progress.event == "undo":
            self._leave(f"not done, after {self._elapsed_s:.1f} s", "yellow")
        line = talk_line(progress)
        if line is not None:
            self._say(Text(line))

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def _begin(self, progress: Progress) -> None:
        self._latest, self._began = progress, time.monotonic()
        self._live = _Line(
            console=self._console,
            get_renderable=self._line,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start(refresh=True)

    def _leave(self, outcome: str, style: str) -> None:
        """Turn the live line, if any, into a permanent one."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
            self._say(Text.assemble(printable(self._latest.description), "  ", (outcome, style)))

    def _say(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)

    def _figures(self, latest: Progress) -> str:
        if latest.total_bytes:
            return how_far(latest)
        return f"{self._elapsed_s:.1f} s" + (f", {how_far(latest)}" if latest.size_bytes else "")

    def _line(self) -> RenderableType:
        latest = self._latest
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        cells: list[RenderableType] = [self._spinner, Text(printable(latest.description))]
        if latest.total_bytes and self._console.width >= WIDTH_FOR_BAR:
            line.add_column(width=BAR_WIDTH)
            cells.append(ProgressBar(total=latest.total_bytes, completed=latest.size_bytes, width=BAR_WIDTH))
        line.add_column(no_wrap=True, justify="right")
        cells.append(Text(self._figures(latest)))
        line.add_row(*cells)
        return line
