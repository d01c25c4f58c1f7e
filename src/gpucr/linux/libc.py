"""The C library of this process: functions that Python lacks, and their errors.

Imports stay few: keepers and guards load this module.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

_LIBRARY = ctypes.CDLL(None, use_errno=True)


def function(name: str, *arguments: Any, result: Any = ctypes.c_int) -> Callable[..., int]:
    """A C library function with these argument and result types; a new object with each call."""
    found = _LIBRARY[name]  # attribute access would share one prototype
    found.restype = result
    if arguments:  # otherwise every call passes ctypes
        found.argtypes = arguments
    return found


def last_error(what: str, path: str | None = None) -> OSError:
    """The OSError for the errno of this thread's last call; ``what`` names the call."""
    number = ctypes.get_errno()
    text = f"{what}: {os.strerror(number)}" if what else os.strerror(number)
    return OSError(number, text) if path is None else OSError(number, text, path)


def check(result: int, what: str, path: str | None = None) -> int:
    """The result of a call. Raises OSError if it is negative (the call failed)."""
    if result < 0:
        raise last_error(what, path)
    return result


memcmp = function("memcmp", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
"""memcmp(3): addresses, or bytes. It runs without the GIL."""
