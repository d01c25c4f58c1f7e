"""A program that is disturbed goes no further than it may: it would have ended before a slow machine came to it.

How many steps it may do is the size of a file. It is never open: a dump may come at any moment, and a restore refuses a
file that has changed in size since.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "GPUCR_TEST_MAY_STEP"
AHEAD = 20
NO_LIMIT = 1 << 40


def wait_for(step: int, file: str | Path | None = None) -> None:
    """Until that file, or the one that the variable names, says that so many steps may be done, if there is one."""
    file = file or os.environ.get(VARIABLE)
    while file is not None and os.path.exists(file) and step >= os.stat(file).st_size:
        time.sleep(0.005)


def let_continue(file: Path, steps: int) -> None:
    """Let the program do so many steps, or as many as it may already."""
    with file.open("ab") as limit:
        limit.truncate(max(steps, limit.tell()))


def file_beside(lines: Path) -> Path:
    """Where a program that writes these lines looks."""
    return lines.with_name(f"{lines.name}.may-step")
