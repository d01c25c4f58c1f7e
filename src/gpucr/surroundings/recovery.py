"""Remove what a dead dump or restore has left in the folders that a job shares with others."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from gpucr.errors import ProcessNotFound
from gpucr.linux import cut_back, processes, trusted_paths
from gpucr.linux.cut_back import CutOff
from gpucr.linux.files_in_use import Inode, linked_files
from gpucr.linux.one_look import OneLook
from gpucr.linux.trusted_paths import opened_folder
from gpucr.model import Job, ProcessId
from gpucr.snapshot.shared_files import MadeFile, remove_made
from gpucr.undo.recovery import Action

_REMAP = re.compile(r"link_remap\.\d+")


class RemoveLinkRemaps(Action):
    """Remove names that a killed CRIU has left, ``link_remap.N``.

    CRIU gives such a name to an open file that has lost its own, and removes it at the end of the dump. One that stays
    can be in the way of another job's dump. ``files``: folders and inodes of those that the job had before the dump.
    """

    is_on_record: ClassVar[bool] = True

    roots: tuple[ProcessId, ...]
    files: tuple[tuple[str, Inode], ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Remove those of these files, and of those that the job has now."""
        alive = [root.pid for root in self.roots if processes.is_alive(root)]
        above = f"{processes.PROC}/{alive[0]}/root" if alive else ""
        for folder, inode in {*self.files, *_nameless(_pids_below(alive), OneLook())}:
            with contextlib.suppress(OSError), opened_folder(above + folder) as held:
                for name in filter(_REMAP.fullmatch, os.listdir(held)):
                    status = os.lstat(name, dir_fd=held)
                    if (status.st_dev, status.st_ino) == inode:
                        os.unlink(name, dir_fd=held)
        return False


def link_remaps(job: Job, look: OneLook) -> RemoveLinkRemaps:
    """The action for its trees, before their dump."""
    roots = tuple(process.id for process in job.processes if process.pid in job.root_pids)
    return RemoveLinkRemaps(roots, tuple(_nameless(job.pids, look)))


def _pids_below(root_pids: Iterable[int]) -> Iterator[int]:
    for root_pid in root_pids:
        with contextlib.suppress(ProcessNotFound):
            yield from (process.pid for process in processes.tree(root_pid))


def _nameless(pids: Iterable[int], look: OneLook) -> Iterator[tuple[str, Inode]]:
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in linked_files(pid, look):
                if can_be_told(file.path):
                    yield os.path.dirname(file.path), file.inode


class RemoveSharedFiles(Action):
    """Remove files of shared memory that a restore was putting back below ``root``, and folders made for them.

    ``mark``: in the names of those that are not complete.
    """

    is_on_record: ClassVar[bool] = True

    root: str
    mark: str
    files: tuple[MadeFile, ...]
    folders: tuple[str, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Remove those that are as the restore made them."""
        remove_made(Path(self.root), self.mark, self.files, self.folders)
        return False


class RemoveSocketFolders(Action):
    """Remove folders that a restore has made for the job's sockets, outermost first, with nothing but sockets."""

    is_on_record: ClassVar[bool] = True

    paths: tuple[str, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        for path in reversed(self.paths):
            remove_socket_folder(path)
        return False


def remove_socket_folder(path: str) -> None:
    """Remove this folder, and CRIU's sockets in it, which nobody uses any more. Anything else stays."""
    with contextlib.suppress(OSError):
        with opened_folder(path) as held:
            if all(stat.S_ISSOCK(os.lstat(name, dir_fd=held).st_mode) for name in os.listdir(held)):
                for name in os.listdir(held):
                    os.unlink(name, dir_fd=held)
        trusted_paths.remove_empty_folder(path)


class PutBackCuts(Action):
    """Append to the job's files again what a restore was cutting off."""

    is_on_record: ClassVar[bool] = True

    cuts: tuple[CutOff, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Put it back. Raises OSError if a file has been written to meanwhile: its old end is kept beside it."""
        errors: list[OSError] = []
        for cut in reversed(self.cuts):
            try:
                cut_back.put_back(cut)
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return False


def can_be_told(path: str) -> bool:
    """Whether an action can name this path: it is UTF-8."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
