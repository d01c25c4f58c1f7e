"""Clean up what a dead dump has left on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from gpucr.snapshot import working_folder
from gpucr.snapshot.folder import UnfinishedSnapshot
from gpucr.undo.recovery import Action


class DiscardFolder(Action):
    """Remove a snapshot folder unless it is committed. The descriptor is the folder itself.

    ``path`` may lead to another one by now: ``inode`` is the folder's device and inode. ``mode_before``: it existed,
    empty, with this mode.
    """

    outlives_job: ClassVar[bool] = True
    is_on_record: ClassVar[bool] = True

    path: str
    inode: tuple[int, int]
    mode_before: int | None

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Remove it, unless another dump has it by now."""
        folder = UnfinishedSnapshot.left_behind(Path(self.path), self.mode_before, *descriptors)
        if not descriptors and not folder.take_over(self.inode):
            return False
        if not folder.is_committed:
            folder.discard()
        return False


class RemoveWorkingFolder(Action):
    """Remove a working folder in any case (see working_folder.py)."""

    outlives_job: ClassVar[bool] = True
    is_on_record: ClassVar[bool] = True

    path: str

    def recover(self, descriptors: Sequence[int]) -> bool:
        working_folder.remove(Path(self.path))
        return False


def discard_folder(folder: UnfinishedSnapshot) -> tuple[DiscardFolder, tuple[int]]:
    """The action for a new folder, and its descriptor."""
    status = folder.held.status()
    inode = status.st_dev, status.st_ino
    return DiscardFolder(str(folder.path.absolute()), inode, folder.mode_before), (folder.held.fd,)
