"""Recovery of a running CRIU, and of what it has restored, if gpucr dies."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpucr.criu import abandoned
from gpucr.errors import JobChanged
from gpucr.linux import processes
from gpucr.model import ProcessId
from gpucr.undo.recovery import Action


class EndDump(Action):
    """Make a dump by ``criu`` fail and release the tree, unless the snapshot is committed: then it ends the tree.

    The descriptor is the snapshot's folder, in which a file ``committed_by`` says so.
    """

    criu: ProcessId
    committed_by: str

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Wait for it, or have it undo."""
        if any(_exists(self.committed_by, fd) for fd in descriptors):
            abandoned.wait(self.criu)  # it ends the tree, as it should, or found the socket closed and undoes
            return True
        abandoned.end_dump(self.criu)
        return False


class EndRestore(Action):
    """End these CRIUs (each waits for the next one) and the tasks of ``pids`` that they have made."""

    criu: tuple[ProcessId, ...]
    pids: tuple[int, ...]

    def recover(self, descriptors: Sequence[int]) -> bool:
        """End them."""
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
