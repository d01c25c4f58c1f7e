"""A program that is disturbed goes no further than it may: it would have ended before a slow machine came to it."""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "GPUCR_TEST_MAY_STEP"
AHEAD = 20


def wait_for(step: int) -> None:
    """Until the file that the variable names says that so many steps may be done, if there is one."""
    file = os.environ.get(VARIABLE)
    while file is not None and step >= int(Path(file).read_text() or 0):
        time.sleep(0.005)


def let_go_on(file: Path, steps: int) -> None:
    """Let the program do so many steps."""
    new = file.with_suffix(".new")
    new.write_text(str(steps))
    new.replace(file)
