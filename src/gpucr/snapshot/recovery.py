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

    ``path`` may lead to another one by now. ``mode_before``: it existed, empty, with this mode.
    """

    outlives_job: ClassVar[bool] = True

    path: str
    mode_before: int | None

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Remove it."""
        folder = UnfinishedSnapshot.left_behind(Path(self.path), self.mode_before, *descriptors)
        if not folder.is_committed:
            folder.discard()
        return False


class RemoveWorkingFolder(Action):
    """Remove a working folder in any case (see working_folder.py)."""

    outlives_job: ClassVar[bool] = True

    path: str

    def recover(self, descriptors: Sequence[int]) -> bool:
        """Remove it."""
        working_folder.remove(Path(self.path))
        return False


def discard_folder(folder: UnfinishedSnapshot) -> tuple[DiscardFolder, tuple[int]]:
    """The action for a new folder, and its descriptor."""
    return DiscardFolder(str(folder.path.absolute()), folder.mode_before), (folder.held.fd,)
