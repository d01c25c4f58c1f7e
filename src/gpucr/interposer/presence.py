"""Whether a process has the interposer, told from outside."""

from __future__ import annotations

from gpucr.interposer.build import LIBRARY
from gpucr.linux import memory, processes

AGENT_THREAD = "gpucr-agent"


def is_interposed(pid: int) -> bool:
    """Whether the process has the library loaded."""
    return memory.has_mapped(pid, f"/{LIBRARY}")


def agent_threads(pid: int) -> tuple[int, ...]:
    """The agent's thread in this process: it calls the driver when it is asked to, and only then."""
    return tuple(tid for tid in processes.threads(pid) if _name_of(tid) == AGENT_THREAD) if is_interposed(pid) else ()


def _name_of(tid: int) -> str:
    stat = processes.read_stat(tid)
    return stat.name if stat is not None else ""
