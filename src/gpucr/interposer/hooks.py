"""For the program itself: functions that are called before gpucr freezes it, and when it runs again.

Loaded in a job, so it needs next to nothing. Without the interposer both functions do nothing.
"""

from __future__ import annotations

import ctypes
import sys
import traceback
from collections.abc import Callable

from gpucr.linux import libc

_HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_registered: list[object] = []
"""What C calls must not be collected."""


def before_freeze(function: Callable[[], object]) -> Callable[[], object]:
    """Have it called before this process is frozen: for a suspend, a dump, a move, `gpucr.freeze`. Also a decorator.

    It runs in a thread of its own while the others keep running, and may use CUDA. An exception is printed;
    it, or a function that takes more than 10 s, is a warning of gpucr's, and the freeze proceeds. Without the
    interposer nothing calls it. A forked child has none. Raises ValueError where there are 16 already.
    """
    return _register("gpucr_before_freeze", function)


def after_restore(function: Callable[[], object]) -> Callable[[], object]:
    """Have it called when this process runs again: after a resume or restore, and after a freeze that failed.

    As `before_freeze` in all else. The process runs already when it is called.
    """
    return _register("gpucr_after_restore", function)


def _register(name: str, function: Callable[[], object]) -> Callable[[], object]:
    try:
        register = libc.function(name, _HOOK, ctypes.c_void_p)
    except AttributeError:
        return function

    def hook(_: int | None) -> int:
        try:
            function()
        except BaseException:  # noqa: BLE001 - nothing above takes it
            traceback.print_exc(file=sys.stderr)
            return 1
        return 0

    called = _HOOK(hook)
    if register(called, None) != 0:
        raise ValueError("16 functions are registered already")
    _registered.append(called)
    return function
