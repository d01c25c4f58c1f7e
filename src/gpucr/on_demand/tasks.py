"""The end of asyncio's tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_AGAIN_S = 0.2


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel them until they have ended, however they do.

    Once is not enough before Python 3.12: `asyncio.wait_for` keeps its result if it comes at the same moment.
    """
    every = tuple(tasks)
    left = set(every)
    while left:
        for each in left:
            each.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
    for each in every:
        if not each.cancelled():
            each.exception()  # seen
