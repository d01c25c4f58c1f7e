"""Tables of text that fit a terminal: the last column takes what is left, and the least important ones give way."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH_WITHOUT_TERMINAL = 200
_GAP = 2
_LEAST_LAST = 16
"""The last column is not narrowed below this while another one can give way."""


@dataclass(frozen=True)
class Column:
    """``rank``: 0 stays on the narrowest terminal; of the others the highest gives way first."""

    title: str
    rank: int = 0
    is_number: bool = False


def terminal_width() -> int | None:
    """How wide the terminal on stdout is; None where there is none, or one that has not been told its size (0)."""
    return (os.get_terminal_size(sys.stdout.fileno()).columns or None) if sys.stdout.isatty() else None


def output_width() -> int:
    """How wide a line on stdout may be."""
    return terminal_width() or WIDTH_WITHOUT_TERMINAL


def fit(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The lines of the table, titles first, none longer than ``width``."""
    sizes = [max(len(column.title), *(len(row[n]) for row in rows), 0) for n, column in enumerate(columns)]
    shown = list(range(len(columns)))
    while _needed(shown, sizes) > width and any(columns[n].rank for n in shown[:-1]):
        shown.remove(max(shown[:-1], key=lambda n: columns[n].rank))
    lines = [[column.title for column in columns], *rows]
    return [_line(columns, [line[n] for n in shown], shown, sizes)[:width].rstrip() for line in lines]


def _needed(shown: Sequence[int], sizes: Sequence[int]) -> int:
    last = min(sizes[shown[-1]], _LEAST_LAST)
    return sum(sizes[n] + _GAP for n in shown[:-1]) + last


def _line(columns: Sequence[Column], cells: Sequence[str], shown: Sequence[int], sizes: Sequence[int]) -> str:
    padded = [
        cell.rjust(sizes[n]) if columns[n].is_number else cell.ljust(sizes[n])
        for n, cell in zip(shown, cells, strict=True)
    ]
    return (" " * _GAP).join(padded)
