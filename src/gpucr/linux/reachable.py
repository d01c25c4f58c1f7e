"""Whether other users can get at a file: what root has installed for all of them may lie behind a private folder."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path


def closed_to_others(paths: Iterable[Path]) -> Path | None:
    """The first folder or file on the way to one of these that others may not enter or read; None: there is none.

    Both the path itself and what its links lead to are checked, by mode bits alone: access lists are not read. Raises
    OSError if one is missing.
    """
    for path in paths:
        for way in dict.fromkeys((Path(os.path.abspath(path)), path.resolve(strict=True))):
            for each in (*reversed(way.parents), way):
                if each.is_symlink():  # what it leads to is on the other way
                    continue
                mode = each.stat().st_mode
                if not mode & (stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH):
                    return each
    return None
