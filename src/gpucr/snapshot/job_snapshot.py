"""What all snapshots of jobs have in common, in a folder or in a store."""

from __future__ import annotations

from typing import Protocol

from gpucr.snapshot.manifest import Manifest


class JobSnapshot(Protocol):
    """A committed snapshot of a job."""

    @property
    def manifest(self) -> Manifest:
        """What was dumped, where and how: read and checked when the snapshot was opened."""

    @property
    def where(self) -> str:
        """Its name for commands, valid in any folder: a path, or ``STORE#ID``."""

    def verify(self) -> None:
        """Read and check all of it. Raises SnapshotDamaged or StoreDamaged."""
