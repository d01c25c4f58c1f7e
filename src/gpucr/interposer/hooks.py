"""For programs: register functions to call before gpucr freezes the program, and when it runs again.

Loaded in a job, so it imports almost nothing. Without the interposer both functions do nothing.
"""

from __future__ import annotations

import ctypes
import sys
import traceback
from collections.abc import Callable

from gpucr.linux import libc

_HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_registered: list[object] = []
"""Keep C callbacks from being garbage-collected."""


def before_freeze(function: Callable[[], object]) -> Callable[[], object]:
    """Register a function to call before this process is frozen: for a suspend, a dump, a move, `gpucr.freeze`.

    Also a decorator. It runs in its own thread while the others keep running, and may use CUDA. An exception is
    printed. After an exception or 10 s gpucr warns, and the freeze proceeds. Without the interposer it is never called.
    A forked child inherits no functions. Raises ValueError if there are 16 already.
    """
    return _register("gpucr_before_freeze", function)


def after_restore(function: Callable[[], object]) -> Callable[[], object]:
    """Register a function to call when this process runs again: after a resume or restore, and after a failed freeze.

    Otherwise like `before_freeze`. The process runs already when it is called.
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
        except BaseException:  # noqa: BLE001 - the caller is C
            traceback.print_exc(file=sys.stderr)
            return 1
        return 0

    called = _HOOK(hook)
    if register(called, None) != 0:
        raise ValueError("16 functions are registered already")
    _registered.append(called)
    return function
