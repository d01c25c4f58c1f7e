"""Let processes with an interposer allow gpucr to trace them despite Yama.

Yama (ptrace_scope 1) lets a process be traced by its ancestors, and by a tracer that it names. gpucr, its guard and
CRIU are not ancestors of most jobs, so the agent admits its user's other processes during an operation. That grants no
new access: every process of that user can ask the agent too.
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
    """During the block gpucr and its children may trace processes with an agent, if that needs permission."""
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
    """Ask this process's agent. Without an answer nothing changes: the tracer will notice."""
    with contextlib.suppress(OSError, Refused, BadAnswer), Agent(pid, answer_s=ANSWER_S) as agent:
        agent.open_to_tracers(is_open=is_open)
