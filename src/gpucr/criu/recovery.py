"""Recovery of a running CRIU, and of what it has restored, if gpucr dies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import ClassVar

from gpucr.criu import abandoned, remains
from gpucr.errors import JobChanged
from gpucr.linux import processes
from gpucr.linux.trusted_paths import opened_folder
from gpucr.model import ProcessId
from gpucr.undo.recovery import Action, NotYet

_UNDO_LIMIT_S = 5.0
"""How long the next gpucr waits for a CRIU whose guard has died, too."""


class EndDump(Action):
    """Make a dump by ``criu`` fail and release the tree, unless the snapshot is committed: then it ends the tree.

    The descriptor is the snapshot's folder, in which a file ``committed_by`` says so. Without it CRIU is only waited
    for: it undoes by itself when it finds that its gpucr has died.
    """

    is_on_record: ClassVar[bool] = True

    criu: ProcessId
    committed_by: str

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Wait for it, or have it undo; then end what it may have left."""
        is_committed = any(_exists(self.committed_by, fd) for fd in descriptors)
        if is_committed:
            abandoned.wait(self.criu)  # it ends the tree, as it should, or found the socket closed and undoes
        elif descriptors:
            abandoned.end_dump(self.criu)
        elif not abandoned.wait(self.criu, _UNDO_LIMIT_S):
            raise NotYet
        remains.kill_session(self.criu)
        return is_committed


class RemoveImages(Action):
    """Remove the changed images with this ``mark`` that were made for CRIU in these ``folders``."""

    outlives_job: ClassVar[bool] = True
    is_on_record: ClassVar[bool] = True

    folders: tuple[str, ...]
    mark: str

    def recover(self, descriptors: Sequence[int]) -> bool:
        from gpucr.criu.images import remove_changed  # late: protobuf, which other recoveries do not need

        for folder in self.folders:
            with contextlib.suppress(FileNotFoundError):  # a working folder, for example
                remove_changed(folder, self.mark)
        return False


class RemoveGhosts(Action):
    """Remove the names under which a killed CRIU has made files that are to have none (`own_ghosts`)."""

    is_on_record: ClassVar[bool] = True

    paths: tuple[str, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        for path in self.paths:
            with contextlib.suppress(OSError), opened_folder(os.path.dirname(path)) as folder:
                os.unlink(os.path.basename(path), dir_fd=folder)
        return False


class EndRestore(Action):
    """End these CRIUs (each waits for the next one) and the tasks of ``pids`` that they have made."""

    criu: tuple[ProcessId, ...]
    pids: tuple[int, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        for each in reversed(self.criu):
            abandoned.end_restore(each, self.pids)
        return False


class EndRestored(Action):
    """End restored processes with their descendants."""

    roots: tuple[ProcessId, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Kill them. Raises JobChanged if one does not end."""
        left: list[ProcessId] = []
        for root in self.roots:
            if processes.is_alive(root):
                left += processes.kill_tree(root.pid, including_root=True)
        if left:
            names = ", ".join(str(process.pid) for process in left)
            raise JobChanged(f"half-restored processes do not end: {names}", pids=[each.pid for each in left])
        return False


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
