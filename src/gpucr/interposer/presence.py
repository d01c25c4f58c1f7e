"""Whether a process has the interposer, seen from outside."""

from __future__ import annotations

from gpucr.interposer.build import LIBRARY
from gpucr.linux import memory, processes

AGENT_THREAD = "gpucr-agent"


def has_library(pid: int) -> bool:
    """Whether the process has the library loaded."""
    return memory.has_mapped(pid, f"/{LIBRARY}")


def agent_threads(pid: int) -> tuple[int, ...]:
    """The agent's thread in this process, which calls the driver only on request."""
    return tuple(tid for tid in processes.threads(pid) if _name_of(tid) == AGENT_THREAD) if has_library(pid) else ()


def is_interposed(pid: int) -> bool:
    """Whether the process has an agent. Without one, its memory cannot be away.

    An agent starts with the first CUDA call, and ends with the process. If it cannot make a socket, or calls bypass the
    library, the library is loaded without an agent.
    """
    return bool(agent_threads(pid))


def _name_of(tid: int) -> str:
    stat = processes.read_stat(tid)
    return stat.name if stat is not None else ""
