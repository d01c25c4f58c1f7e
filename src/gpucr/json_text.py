"""Parse untrusted or damaged JSON within limits."""

from __future__ import annotations

import json
import math
from typing import NoReturn

MAX_DEPTH = 32
"""Maximum nesting of lists and objects. gpucr's own formats need eight levels; Python fails at about 1000."""


def parse(data: bytes | str, *, least: int = -(1 << 63)) -> object:
    """The value. Raises ValueError with the reason if it is not JSON or is nested more than MAX_DEPTH deep.

    Integers must be ``least`` to 2^64 - 1, and other numbers finite.
    """
    try:
        value: object = json.loads(data, parse_constant=_refuse)
    except RecursionError as e:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from e
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for each in level:
            if isinstance(each, str):
                continue
            if isinstance(each, dict):
                below += each.values()
            elif isinstance(each, list):
                below += each
            elif (isinstance(each, int) and not least <= each < 1 << 64) or (
                isinstance(each, float) and math.isinf(each)
            ):
                raise ValueError("a number is out of range")
        if not below:
            return value
        level = below
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
