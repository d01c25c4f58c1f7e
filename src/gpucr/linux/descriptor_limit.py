"""The open-file limit (RLIMIT_NOFILE): raised during an operation, with some descriptors reserved for its undo.

A process that is out of descriptors cannot ask for the state of another one, let alone bring it back. So an operation
raises its soft limit, and reserves what its undo may need before it changes anything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterator

OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Errors for "no more files can be opened": by this process, on this machine."""

_WANTED = 1 << 16  # thousands of ranks; beyond that, programs that loop up to the limit become slow

_turn = threading.Lock()
_users = 0
_found: tuple[int, int] | None = None


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raise the soft limit to the hard one (at most 65536) during the block. Blocks may overlap, in several threads.

    Processes started meanwhile inherit it; one that outlives the block gets `of_others` instead.
    """
    global _users, _found  # noqa: PLW0603 - the limit is the process's, too
    with _turn:
        if _users == 0:
            soft, hard = _found = resource.getrlimit(resource.RLIMIT_NOFILE)
            if soft != resource.RLIM_INFINITY:
                most = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        _users += 1
    try:
        yield
    finally:
        with _turn:
            _users -= 1
            if _users == 0 and _found is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, _found)
                _found = None


def most() -> int:
    """How many descriptors an operation may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard):
        return _WANTED
    return max(soft, min(hard, _WANTED))


def of_others() -> int:
    """The soft limit that this process was started with, which users' programs get."""
    with _turn:
        return _found[0] if _found is not None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Reserve:
    """Reserves this many descriptors until `release`. Raises OSError if there are fewer."""

    def __init__(self, count: int) -> None:
        self._fds: list[int] = []
        try:
            for _ in range(count):
                self._fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self.release()
            raise

    def release(self) -> None:
        """Give them back. Safe to call again."""
        while self._fds:
            os.close(self._fds.pop())
