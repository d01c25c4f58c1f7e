"""Times on the command line: ``90s``, ``10m``, ``12h``, ``7d``, ``2w``."""

from __future__ import annotations

import re
from typing import Any

import click

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


class Duration(click.ParamType):  # type: ignore[type-arg]  # click 8.1 knows no arguments
    """A time like ``90s``, ``10m``, ``12h``, ``7d`` or ``2w``: a float, in seconds. ``words`` are taken as they are."""

    name = "duration"

    def __init__(self, *words: str) -> None:
        self._words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        """Raises click's usage error if it is invalid."""
        if isinstance(value, float) or value in self._words:
            return value  # type: ignore[no-any-return]
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|[smhdw])", str(value))
        if found is None:
            also = "".join(f", or {word}" for word in self._words)
            self.fail(f"{value!r} is no time: write 90s, 10m, 12h, 7d or 2w{also}", param, ctx)
        return float(found[1]) * _UNITS[found[2]]
