"""What the kernel allows the caller's session. CRIU, with its capabilities, would give a job back what it once had.

A job may have been dumped in another session: under larger limits (a batch job, another machine), less nice, or less
likely to be killed when memory runs out. Restored, it gets no more than a program that is started in the caller's.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from msgspec import Struct

from gpucr.linux import proc_text, processes

_NAME_COLUMNS = 26  # of a line in /proc/PID/limits
_LEAST_NICE, _NICE_OF_LIMIT = -20, 20
"""RLIMIT_NICE is 20 minus the niceness (getrlimit(2))."""
_RLIMIT_NICE, _RLIMIT_RTPRIO = 13, 14  # include/uapi/asm-generic/resource.h


class Session(Struct, frozen=True):
    """``limits``: each resource with its soft and hard limits. ``nice``, ``oom_score_adj``: the caller's own."""

    limits: tuple[tuple[int, int, int], ...]
    nice: int
    oom_score_adj: int

    @property
    def least_nice(self) -> int:
        """The lowest niceness that it can have."""
        hard = self._hard(_RLIMIT_NICE)
        return _LEAST_NICE if hard == resource.RLIM_INFINITY else min(self.nice, _NICE_OF_LIMIT - hard)

    def may_have_priority(self, priority: int) -> bool:
        """Whether it can have this real-time priority."""
        hard = self._hard(_RLIMIT_RTPRIO)
        return hard == resource.RLIM_INFINITY or priority <= hard

    def _hard(self, wanted: int) -> int:
        return next((hard for number, _, hard in self.limits if number == wanted), 0)


def of(pid: int) -> Session:
    """The session of a process. From /proc: prlimit(2) needs CAP_SYS_RESOURCE for another user's. Raises OSError."""
    with open(f"/proc/{pid}/oom_score_adj", encoding="ascii") as file:
        oom_score_adj = int(file.read())
    return Session(tuple(_limits(pid)), os.getpriority(os.PRIO_PROCESS, pid), oom_score_adj)


def hold_within(pid: int, session: Session) -> None:
    """Take from a stopped process what the session could not give it. Needs its user's id. Raises OSError."""
    for number, _, most in session.limits:
        soft, hard = resource.prlimit(pid, number)
        held = lower(soft, most), lower(hard, most)
        if held != (soft, hard):
            resource.prlimit(pid, number, held)
    _hold_oom_score(pid, session)
    for tid in processes.threads(pid):
        _hold_priority(tid, session)


def hold_self_within(session: Session) -> None:
    """The same for the calling process, with the session's own soft limits. Raises OSError."""
    for number, soft, hard in session.limits:
        most = resource.getrlimit(number)[1]
        resource.setrlimit(number, (lower(soft, most), lower(hard, most)))
    _hold_oom_score("self", session)
    _hold_priority(0, session)


def lower(limit: int, other: int) -> int:
    """The lower one of two limits."""
    return min((each for each in (limit, other) if each != resource.RLIM_INFINITY), default=resource.RLIM_INFINITY)


def _hold_oom_score(pid: int | str, session: Session) -> None:
    with open(f"/proc/{pid}/oom_score_adj", "r+", encoding="ascii") as file:
        if int(file.read()) < session.oom_score_adj:
            file.seek(0)
            file.write(str(session.oom_score_adj))


def _hold_priority(tid: int, session: Session) -> None:
    is_real_time = os.sched_getscheduler(tid) & ~os.SCHED_RESET_ON_FORK in (os.SCHED_FIFO, os.SCHED_RR)
    if is_real_time and not session.may_have_priority(os.sched_getparam(tid).sched_priority):
        os.sched_setscheduler(tid, os.SCHED_OTHER, os.sched_param(0))
    if os.getpriority(os.PRIO_PROCESS, tid) < session.least_nice:
        os.setpriority(os.PRIO_PROCESS, tid, session.least_nice)


def _limits(pid: int) -> Iterator[tuple[int, int, int]]:
    for number, line in enumerate(proc_text.lines(f"/proc/{pid}/limits")[1:]):
        soft, hard = line[_NAME_COLUMNS:].split()[:2]
        yield number, _limit(soft), _limit(hard)


def _limit(text: str) -> int:
    return resource.RLIM_INFINITY if text == "unlimited" else int(text)
