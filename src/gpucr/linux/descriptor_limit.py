"""How many files this process may have open (RLIMIT_NOFILE): more during an operation, and some kept for its undo.

A process that is out of descriptors cannot ask where another one is, let alone bring it back. So an operation raises
its soft limit, and takes what its undo may need before it changes anything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections.abc import Iterator

OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Errors that say that no more files can be opened: by this process, on this machine."""

_WANTED = 1 << 16  # thousands of ranks; beyond that, programs that walk all numbers up to the limit become slow

_turn = threading.Lock()
_users = 0
_found: tuple[int, int] | None = None


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """The soft limit is the hard one (but at most 65536) during the block. Several may overlap, in several threads.

    Processes that are started meanwhile inherit it: what outlives the block gets `of_others` instead.
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


def of_others() -> int:
    """The soft limit that this process was started with: what programs of users get."""
    with _turn:
        return _found[0] if _found is not None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Reserve:
    """So many descriptors, which nobody else gets until `release`. Raises OSError where there are not so many."""

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
