"""Whether this process may trace another one, and what prevents it (ptrace(2), "Ptrace access mode checking")."""

from __future__ import annotations

import os
from pathlib import Path

from gpucr.linux import capabilities, proc_text
from gpucr.linux.processes import PROC

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_ANCESTORS_ONLY = 1
NO_ATTACH = 3
"""The scope in which root attaches to nothing either (a dump failed on Linux 6.1), and which only a reboot lowers."""


def yama_scope() -> int | None:
    """kernel.yama.ptrace_scope; None: this kernel has no Yama."""
    try:
        return int(PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        return None


def takes_a_grant() -> bool:
    """Whether the user's processes that are not its children can be traced if they allow it (PR_SET_PTRACER)."""
    return yama_scope() == _ANCESTORS_ONLY and not capabilities.own().has("SYS_PTRACE")


def is_allowed(pid: int) -> bool:
    """Whether this process may trace that one now. True for one that has ended."""
    try:
        os.close(os.open(PROC / str(pid) / "mem", os.O_RDONLY | os.O_CLOEXEC))  # needs the same access as an attach
    except PermissionError:
        return False
    except OSError:
        return True
    return True


def limits() -> str:
    """The machine's known limits on tracing, for a message; empty if there are none."""
    found = []
    scope = yama_scope()
    if scope is not None and (scope >= NO_ATTACH or (scope > 0 and not capabilities.own().has("SYS_PTRACE"))):
        found.append(f"kernel.yama.ptrace_scope is {scope}")
    if proc_text.status_fields(capabilities.STATUS).get("Seccomp", "0") != "0":
        found.append("gpucr runs below a system call filter, as containers have (--security-opt seccomp=unconfined)")
    return " and ".join(found)
