"""Text tables that fit a terminal: a row is one line, and the least important columns are dropped.

Without a terminal (a pipe, a file) nothing is shortened: programs read it, or people later.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence

from msgspec import Struct

_GAP = 2
_ELLIPSIS = "…"


class Column(Struct, frozen=True):
    """One column of a table.

    ``rank`` 0 is always shown; of the others the highest is dropped first. ``least`` is the width to which the column
    is shortened before another one is dropped (None: not at all). A shortened cell keeps both its end and its beginning
    (``/var/…/step-9``), with ``keeps_end=False`` only its beginning.
    """

    title: str
    rank: int = 0
    is_number: bool = False
    least: int | None = None
    keeps_end: bool = True


def terminal_width() -> int | None:
    """The width of the terminal on stdout; None if there is none, or its size is unset (0)."""
    return (os.get_terminal_size(sys.stdout.fileno()).columns or None) if sys.stdout.isatty() else None


def fit(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """The lines of the table, titles first, none longer than ``width`` (None: as long as they are)."""
    lines = [[column.title for column in columns], *rows]
    natural = [max(cells(line[n]) for line in lines) for n in range(len(columns))]
    sizes = natural if width is None else _sizes(columns, natural, width)
    shown = [n for n, size in enumerate(sizes) if size]
    return [shortened(_line(columns, line, shown, sizes).rstrip(), width) for line in lines]


def _sizes(columns: Sequence[Column], natural: Sequence[int], width: int) -> list[int]:
    """The width of each column; 0: it is left out."""
    sizes = [min(size, column.least or size) for size, column in zip(natural, columns, strict=True)]
    by_rank = sorted(range(len(columns)), key=lambda n: columns[n].rank)
    for n in reversed(by_rank):
        if columns[n].rank and _total(sizes) > width:
            sizes[n] = 0
    for n in by_rank:  # spare width goes to the most important first
        if sizes[n]:
            sizes[n] += min(natural[n] - sizes[n], max(width - _total(sizes), 0))
    while _total(sizes) > width and max(sizes) > 1:  # unrealistically narrow: give each a little
        sizes[sizes.index(max(sizes))] -= 1
    return sizes


def _total(sizes: Sequence[int]) -> int:
    shown = [size for size in sizes if size]
    return sum(shown) + _GAP * max(len(shown) - 1, 0)


def _line(columns: Sequence[Column], line: Sequence[str], shown: Sequence[int], sizes: Sequence[int]) -> str:
    padded = []
    for n in shown:
        text = shortened(line[n], sizes[n], keeps_end=columns[n].keeps_end)
        space = " " * (sizes[n] - cells(text))
        padded.append(space + text if columns[n].is_number else text + space)
    return (" " * _GAP).join(padded)


def cells(text: str) -> int:
    """The text's width on a terminal: some characters take two cells, some none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # imported late: rarely needed

    return cell_len(text)


def shortened(text: str, size: int | None, *, keeps_end: bool = False) -> str:
    """The text in at most ``size`` cells (None: all of it); ``…`` marks omissions."""
    if size is None or cells(text) <= size:
        return text
    if size <= 1:
        return _ELLIPSIS[:size]
    end = (size - 1) // 2 if keeps_end and size >= _SHORTEST_WITH_END else 0
    return _first(text, size - 1 - end) + _ELLIPSIS + _first(text[::-1], end)[::-1]


_SHORTEST_WITH_END = 9
"""With less, beginning and end would not be meaningful."""


def _first(text: str, size: int) -> str:
    while cells(text) > size:
        text = text[: max(size, 0)] if len(text) > size else text[:-1]
    return text


def wrapped(text: str, width: int | None, *, first: str = "", indent: int | None = None) -> Iterator[str]:
    """Prose in lines of at most ``width``, broken between words: behind ``first``, the others indented by ``indent``.

    ``indent``: None for the length of ``first``. ``width``: None for one line.
    """
    if width is None:
        yield (first + text).rstrip()
        return
    below = " " * (cells(first) if indent is None else indent)
    size = max(width, len(below) + 1)
    lines = textwrap.wrap(text, size, initial_indent=first, subsequent_indent=below, break_on_hyphens=False)
    yield from lines or [first.rstrip()]
