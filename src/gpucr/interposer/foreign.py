"""Memory that is another process's as the driver sees it, and what that forbids.

Driver 580 checkpoints a process that has imported memory mapped, and can never restore it (measured: 801, the process
is lost). Two kinds of memory are imported: that of other processes, and a process's own that came back to it by a
descriptor (RETURNED). An interposer takes both away before the driver's checkpoint. So the driver never gets a process
with any of it: what cannot leave is refused beforehand, and `require_own` stands before every checkpoint of a gang.
"""

from __future__ import annotations

import sys

from gpucr.errors import InterposerError
from gpucr.interposer.client import ask_status
from gpucr.interposer.presence import is_interposed
from gpucr.interposer.protocol import Status
from gpucr.quantities import counted

NOTHING_TO_LEAVE = "it has no memory that could leave"
CODE = "GPUCR-IMPORTED-MEMORY"


def why_by_driver(status: Status) -> str | None:
    """Why memory cannot leave a process by its interposer, or not as a whole, and the driver has to take it; None:

    it can.
    """
    if not status.blocks and not status.imported:
        return NOTHING_TO_LEAVE
    reasons = (
        (status.stuck, "{} of its blocks cannot leave"),
        (status.away, "{} of its blocks are away already"),
        (status.around, "{} of its libraries may come to the driver around the gate"),
    )
    return next((text.format(count) for count, text in reasons if count), None)


def is_lost_by_driver(status: Status, *, by_interposer: bool) -> bool:
    """Whether a checkpoint now would lose the process. ``by_interposer``: its memory may leave by it."""
    return status.foreign > 0 and (not by_interposer or status.captive > 0 or why_by_driver(status) is not None)


def require_own(pid: int, *, may_be_silent: bool) -> None:
    """The driver is about to checkpoint it:

    raise InterposerError if it has memory that the driver could not bring back.

    ``may_be_silent``: without an answer of its interposer it has none, as was found out before.
    """
    if not is_interposed(pid):
        return
    status = ask_status(pid)
    if status is None and not may_be_silent:
        raise InterposerError(
            f"the interposer of process {pid} does not say whether the driver could restore it",
            hint=f"`gpucr resume {pid}` continues it",
        )
    if status is not None and status.foreign:
        raise InterposerError(
            f"process {pid} has {counted(status.foreign, 'block')} of imported memory, which the driver cannot restore",
            hint=f"`gpucr doctor {pid}` says what keeps it there",
            code=CODE,
        )


def main(pid: int) -> int:
    """For a caller that loads none of this: 0 if the driver may checkpoint the process; else says why not."""
    try:
        require_own(pid, may_be_silent=True)
    except InterposerError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
