"""A folder that stays the one that was opened, whatever becomes of the path that led to it."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path

from gpucr.linux import trusted_paths


class HeldFolder:
    """An open folder. ``path`` leads to it in this process, as long as this object is there: not in another process.

    Who owns the folder above can put another one in its place at any time. What is opened below ``path`` is always in
    this one (proc_pid_fd(5)). Errors of gpucr show the real path in its place (errors.py).
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.path = Path(f"/proc/self/fd/{fd}")
        weakref.finalize(self, os.close, fd)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> HeldFolder:
        """Raises OSError, ELOOP where the path leads through a link that another user can change."""
        return cls(trusted_paths.open_folder(path))

    def status(self) -> os.stat_result:
        """Of the folder."""
        return os.fstat(self.fd)

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether this path leads here now."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(path), self.status())
        return False
