"""Times on the command line: ``90s``, ``10m``, ``12h``, ``7d``, ``2w``; a bare number is seconds."""

from __future__ import annotations

import re
from typing import Any

import click

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


class Duration(click.ParamType):  # type: ignore[type-arg]  # click 8.1 knows no arguments
    """A time like ``90``, ``90s``, ``10m``, ``12h``, ``7d`` or ``2w``: a float, in seconds. ``words`` stay."""

    name = "duration"

    def __init__(self, *words: str) -> None:
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        """Raises click's usage error if it is invalid."""
        if isinstance(value, float) or value in self._words:
            return value  # type: ignore[no-any-return]
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhdw]?)", str(value))
        if found is None:
            also = "".join(f", or {word}" for word in self._words)
            self.fail(f"{value!r} is not a time: write 90 or 90s, 10m, 12h, 7d or 2w{also}", param, ctx)
        return float(found[1]) * _UNITS[found[2] or "s"]


class Limit(Duration):
    """How long something may take: a time above 0, or ``least_s`` or more."""

    def __init__(self, least_s: float | None = None) -> None:
        super().__init__()
        self._least_s = least_s

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        """Raises click's usage error if it is invalid."""
        seconds = super().convert(value, param, ctx)
        if isinstance(seconds, float) and (seconds <= 0 or seconds < (self._least_s or 0)):
            what = "above 0" if self._least_s is None else f"{self._least_s:g}s or more"
            self.fail(f"{str(value)!r} is not {what}", param, ctx)
        return seconds
