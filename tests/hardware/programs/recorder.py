"""How the Python programs of this folder take their options and note their steps."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tests.hardware.interposed import pace


class Recorder:
    """Appends one line a step to a file that is open only while a line is written.

    A file that stays open and grows after a dump makes CRIU refuse to restore that snapshot; these programs are
    restored from snapshots that were taken with --leave-running, after the first run has continued.
    """

    def __init__(self, description: str, *flags: str, **numbers: int) -> None:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--steps", type=int, default=100, help="how many steps to make (%(default)s)")
        parser.add_argument("--out", type=Path, required=True, help="the file that gets one line a step")
        parser.add_argument("--pace", type=float, default=0.0, metavar="S", help="seconds to sleep after each step")
        for flag in flags:
            parser.add_argument(flag, action="store_true")
        for name, default in numbers.items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help="(%(default)s)")
        arguments = parser.parse_args()
        self.steps: int = arguments.steps
        self._out: Path = arguments.out
        self._pace_s: float = arguments.pace
        self._may_step = pace.file_beside(self._out)
        self._options = arguments

    def flag(self, name: str) -> bool:
        """Whether the flag was given."""
        return bool(getattr(self._options, name))

    def number(self, name: str) -> int:
        """What was given for one of the program's own numbers."""
        return int(getattr(self._options, name))

    @staticmethod
    def ready() -> None:
        """Say that the warm-up is over. Nothing else is ever printed."""
        print("ready", flush=True)

    def note(self, step: int, *values: float) -> None:
        """Write the step's line, floats exactly, then pause until the next step may be done."""
        texts = [value.hex() if isinstance(value, float) else str(value) for value in values]
        with self._out.open("a") as out:
            out.write(" ".join([str(step), *texts]) + "\n")
        time.sleep(self._pace_s)
        pace.wait_for(step + 1, self._may_step)
