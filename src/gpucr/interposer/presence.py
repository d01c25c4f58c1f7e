"""Whether a process has the interposer, told from outside."""

from __future__ import annotations

from gpucr.interposer.build import LIBRARY
from gpucr.linux import memory, processes

AGENT_THREAD = "gpucr-agent"


def has_library(pid: int) -> bool:
    """Whether the process has the library loaded."""
    return memory.has_mapped(pid, f"/{LIBRARY}")


def agent_threads(pid: int) -> tuple[int, ...]:
    """The agent's thread in this process: it calls the driver when it is asked to, and only then."""
    return tuple(tid for tid in processes.threads(pid) if _name_of(tid) == AGENT_THREAD) if has_library(pid) else ()


def is_interposed(pid: int) -> bool:
    """Whether the process has an agent. Without one none of its memory is away, nor will be.

    An agent starts with the first call of CUDA, and ends with the process. Where it can make no socket, or the calls go
    around the library, the library is loaded and there is no agent.
    """
    return bool(agent_threads(pid))


def _name_of(tid: int) -> str:
    stat = processes.read_stat(tid)
    return stat.name if stat is not None else ""
