"""Progress on stderr: live lines on a terminal, plain ones elsewhere."""

from __future__ import annotations

import os
import sys

from gpucr.cli.output import printable, say
from gpucr.quantities import format_bytes, format_seconds
from gpucr.undo.events import OnProgress, Progress

LINE_INTERVAL_S = 5.0
"""Interval of plain lines in a phase that moves bytes."""


def progress_printer(*, quiet: bool, verbose: bool = False) -> OnProgress | None:
    """The progress display of an operation. ``verbose`` shows its notes too; ``quiet`` shows nothing."""
    if quiet:
        return None
    show: OnProgress
    if _is_terminal():
        from gpucr.cli.live import LiveProgress  # rich takes 50 ms to load: only if visible

        show = LiveProgress()
    else:
        show = PlainProgress()

    def listen(progress: Progress) -> None:
        if verbose or progress.event != "note":
            show(progress)

    return listen


def talk_line(progress: Progress) -> str | None:
    """The line for a note, an undo or a signal. None for progress events."""
    if progress.event == "note":
        return printable(f"{progress.phase}: {progress.description}")
    if progress.event == "undo":
        return f"undoing: {progress.phase}"
    if progress.event == "signal-ignored":
        return progress.description
    return None


def how_far(progress: Progress) -> str:
    """Bytes, rate and time left, if known: ``12.0 of 24.0 GiB, 1.8 GiB/s, 7 s left``."""
    parts = [format_bytes(progress.size_bytes)]
    if progress.total_bytes:
        total = format_bytes(progress.total_bytes)
        number, unit = parts[0].split()
        parts[0] = f"{number if total.endswith(f' {unit}') else parts[0]} of {total}"
    if progress.rate_bytes_per_s is not None:
        parts.append(f"{format_bytes(round(progress.rate_bytes_per_s))}/s")
    if progress.eta_s:
        parts.append(f"{format_seconds(progress.eta_s)} left")
    return ", ".join(parts)


class PlainProgress:
    """One line when a phase begins, and one every few seconds while it moves bytes."""

    def __init__(self) -> None:
        self._next_line_s = LINE_INTERVAL_S

    def __call__(self, progress: Progress) -> None:
        """Take an event."""
        line = talk_line(progress)
        if progress.event == "begin":
            self._next_line_s = LINE_INTERVAL_S
            line = printable(progress.description)
        elif progress.event == "advance" and progress.seconds >= self._next_line_s:
            self._next_line_s = progress.seconds + LINE_INTERVAL_S
            line = f"{progress.phase}: {how_far(progress)}"
        if line is not None:
            say(line)


def _is_terminal() -> bool:
    """Whether stderr is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")
