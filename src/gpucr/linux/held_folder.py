"""An open folder that stays the same even if its path comes to mean something else."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from pathlib import Path

from gpucr.linux import trusted_paths


class HeldFolder:
    """An open folder. ``path`` leads to it in this process, until `close` or the end of this object.

    The owner of the parent folder can replace it at any time. What is opened below ``path`` is always in this one
    (proc_pid_fd(5)). gpucr's errors show the real path instead (errors.py).
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._end = weakref.finalize(self, os.close, fd)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> HeldFolder:
        """Raises OSError, ELOOP if the path leads through a link that another user can change."""
        return cls(trusted_paths.open_folder(path))

    @property
    def fd(self) -> int:
        """Its descriptor. Raises OSError after `close`: the number may belong to another file by then."""
        if not self._end.alive:
            raise OSError(errno.EBADF, "the folder has been closed")
        return self._fd

    @property
    def path(self) -> Path:
        """A path that leads here, in this process only. Raises OSError after `close`."""
        return Path(f"/proc/self/fd/{self.fd}")

    def again(self) -> HeldFolder:
        """The same folder, opened again: closed independently, and without this one's locks."""
        return HeldFolder(os.open(self.path, os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Close it. Idempotent.

        Without this, the file system stays busy while anything refers to this object, such as an error's traceback.
        """
        self._end()

    def status(self) -> os.stat_result:
        """The folder's stat(2)."""
        return os.fstat(self.fd)

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Whether this path leads to this folder now."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.stat(path), self.status())
        return False
