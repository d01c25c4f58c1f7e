"""A folder that stays the one that was opened, whatever becomes of the path that led to it."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from pathlib import Path

from gpucr.linux import trusted_paths


class HeldFolder:
    """An open folder. ``path`` leads to it in this process, until `close` or the end of this object.

    Who owns the folder above can put another one in its place at any time. What is opened below ``path`` is always in
    this one (proc_pid_fd(5)). Errors of gpucr show the real path in its place (errors.py).
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._end = weakref.finalize(self, os.close, fd)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> HeldFolder:
        """Raises OSError, ELOOP where the path leads through a link that another user can change."""
        return cls(trusted_paths.open_folder(path))

    @property
    def fd(self) -> int:
        """Its descriptor. Raises OSError after `close`: the number may be another file's by then."""
        if not self._end.alive:
            raise OSError(errno.EBADF, "the folder has been closed")
        return self._fd

    @property
    def path(self) -> Path:
        """A path that leads here in this process, and in no other one. Raises OSError after `close`."""
        return Path(f"/proc/self/fd/{self.fd}")

    def again(self) -> HeldFolder:
        """The same folder, opened once more: closed on its own, and without the locks of this one."""
        return HeldFolder(os.open(self.path, os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Let it go. Idempotent.

        Else the file system is in use as long as anything refers to this object: an error's traceback, for example.
        """
        self._end()

    def status(self) -> os.stat_result:
        """Of the folder."""
        return os.fstat(self.fd)

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether this path leads here now."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(path), self.status())
        return False
