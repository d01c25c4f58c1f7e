"""What a folder without a manifest is: what a dump that was interrupted has left, or anything else."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from gpucr.errors import SnapshotUnfinished


def unfinished(folder: Path, manifest_file: Path, manifest_name: str, of_a_dump: Collection[str]) -> SnapshotUnfinished:
    """The error for such a folder. Only what a dump has left is said to be removable.

    ``of_a_dump``: a folder with one of these names in it is one.
    """
    names = {each.name for each in folder.iterdir()}
    within = [name for name in sorted(names) if os.path.exists(folder / name / manifest_name)]
    if names.intersection(of_a_dump):
        what, hint = "its dump was never finished", "name another folder; what an interrupted dump left can be removed"
    elif within:
        what, hint = "it is not a snapshot, and has some in it", f"name one: {folder / within[-1]}"
    else:
        what, hint = "it is not a snapshot", "name the folder that was given to dump with --to"
    return SnapshotUnfinished(f"{folder} holds no {manifest_name}: {what}", path=str(manifest_file), hint=hint)
