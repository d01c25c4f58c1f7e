"""Whether a CRIU gets anywhere.

It can wait endlessly while the job stands still: for a file system whose server is frozen, stopped or gone, or at a
restore for a lock that somebody holds (seen with 4.2.1). However slow the disk and large the job, CRIU at work uses the
processor.
"""

from __future__ import annotations

import time

from gpucr.errors import DeadlineExceeded
from gpucr.linux import processes
from gpucr.model import ProcessId

STALL_LIMIT_S = 60.0
"""How long neither CRIU nor what it has started may use the processor."""

LOOK_EVERY_S = 2.0


class Progress:
    """Watches one CRIU with all that it has started. Look at it at least as often as `LOOK_EVERY_S` says.

    ``runs_scripts``: in a dump, what it has started is an action script, which may take its time.
    """

    def __init__(self, criu: ProcessId, *, runs_scripts: bool = False) -> None:
        self._criu = criu
        self._runs_scripts = runs_scripts
        self._ticks = -1
        self._since = time.monotonic()
        self.next_look = self._since + LOOK_EVERY_S

    def restart(self) -> None:
        """It has been waiting for us."""
        self._since = time.monotonic()
        self.next_look = self._since + LOOK_EVERY_S

    def has_stalled(self) -> bool:
        """Whether it has done nothing for so long. Looks only if it is time to."""
        now = time.monotonic()
        if now < self.next_look:
            return False
        self.next_look = now + LOOK_EVERY_S
        own, started = processes.read_stat(self._criu.pid), processes.stats_below(self._criu.pid)
        if own is None or own.status in "ZX":
            return False
        ticks = own.processor_ticks + sum(stat.processor_ticks for stat in started)
        if ticks != self._ticks or (self._runs_scripts and started):
            self._ticks, self._since = ticks, now
        return now - self._since >= STALL_LIMIT_S

    def error(self, phase: str) -> DeadlineExceeded:
        """What to say then."""
        return DeadlineExceeded(
            f"CRIU has done nothing for {STALL_LIMIT_S:g} s in the middle of a {phase}",
            hint="it waits for a file system that does not answer, or for a file lock that another process holds: the "
            "end of its log names the file",
        )
