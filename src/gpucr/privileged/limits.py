"""How many requests are served at a time. The listener counts them, and so does each process that serves one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from gpucr.helper.messages import MAX_REQUESTS_PER_USER
from gpucr.linux import locks, trusted_paths
from gpucr.linux.private_folders import runtime_folder

MAX_REQUESTS = 32
TOO_MANY_OF_YOURS = f"{MAX_REQUESTS_PER_USER} requests of yours are served already"
_FOLDER = "helper-requests"


@contextlib.contextmanager
def place_of(uid: int) -> Iterator[bool]:
    """One of the user's places for a block: whether there is one. What is made in it does not keep it over execve(2).

    Needs root. Raises OSError.
    """
    folder = runtime_folder() / _FOLDER
    trusted_paths.make_private(folder)
    for number in range(MAX_REQUESTS_PER_USER):
        fd = trusted_paths.open_file(folder / f"{uid}-{number}", os.O_RDWR | os.O_CREAT)
        try:
            try:
                locks.lock(fd)
            except BlockingIOError:
                continue
            yield True
            return
        finally:
            os.close(fd)
    yield False
