"""What gpucr itself uses of a GPU, told from outside: it is no job, and no stranger on a GPU that somebody wants.

Descriptors with a name are the sign: whoever may look into a process sees them, and they end with it. A supervisor
calls cuInit once and lives on; a vault holds a context while a job's memory is copied (proc_pid_fd(5)).
"""

from __future__ import annotations

import contextlib
import os

from gpucr.driver.gpus import gpu_processes

_INITIALIZED, _CONTEXT = "gpucr-cuda", "gpucr-vault"
_signs: list[int] = []


def note_initialized() -> None:
    """This process calls cuInit for gpucr. Not for a program that has used CUDA before: that is a job of its own."""
    if not _signs:
        _signs.append(_sign(_INITIALIZED))


def note_context() -> int:
    """This process makes a context for gpucr. Returns the descriptor to close after that."""
    return _sign(_CONTEXT)


def is_gpucrs(pid: int, *, had_memory: bool) -> bool:
    """Whether all that a process uses of CUDA is gpucr's own, as far as the caller may look.

    ``had_memory``: it had device memory when the caller asked NVML. A program that calls gpucr and CUDA later has some
    without a vault. Raises DriverUnavailable.
    """
    signs = _names_of(pid)
    if _INITIALIZED not in signs:
        return False
    # A vault may have been closed since.
    return not had_memory or _CONTEXT in signs or all(use.pid != pid for use in gpu_processes())


def _sign(name: str) -> int:
    return os.memfd_create(name, os.MFD_CLOEXEC)


def _names_of(pid: int) -> set[str]:
    found = set()
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):  # closed meanwhile
                name = os.readlink(f"{folder}/{fd}")
                if name.startswith("/memfd:"):
                    found.add(name.removeprefix("/memfd:").removesuffix(" (deleted)"))
    return found
