"""A job's processes with an interposer let gpucr trace them where Yama would not.

Yama (ptrace_scope 1) allows a process to be traced by its ancestors, and by whom it names itself. gpucr is no ancestor
of most jobs, and neither are its guard and CRIU, so the agent opens the process to its user's other processes for the
time of an operation. That gives nobody more than before: who can be that user's process can ask the agent as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from gpucr.interposer.client import Agent
from gpucr.interposer.presence import is_interposed
from gpucr.interposer.protocol import BadAnswer, Refused
from gpucr.jobs.recovery import CloseToTracers
from gpucr.linux import tracing
from gpucr.model import GangMember
from gpucr.undo.protection import Protection

ANSWER_S = 2.0


@contextlib.contextmanager
def open_to_us(gang: Sequence[GangMember], protection: Protection) -> Iterator[None]:
    """In the block gpucr, and what it starts, may trace the processes that have an agent, if that takes their leave."""
    asked = [each.id for each in gang if is_interposed(each.pid)] if gang and tracing.takes_a_grant() else []
    if not asked:
        yield
        return
    protection.protect(CloseToTracers(processes=tuple(asked)))
    try:
        for each in asked:
            set_open(each.pid, is_open=True)
        yield
    finally:
        for each in asked:
            set_open(each.pid, is_open=False)
        protection.withdraw(CloseToTracers)


def set_open(pid: int, *, is_open: bool) -> None:
    """Ask the agent of this process. One that does not answer leaves it as it was: who traces finds that out."""
    with contextlib.suppress(OSError, Refused, BadAnswer), Agent(pid, answer_s=ANSWER_S) as agent:
        agent.open_to_tracers(is_open=is_open)
