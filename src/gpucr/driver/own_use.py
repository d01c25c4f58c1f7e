"""Recognise gpucr's own GPU use from outside: it is neither a job nor a foreign user of a GPU.

Named descriptors mark it: anyone who may inspect the process sees them, and they end with it (proc_pid_fd(5)). A
supervisor calls cuInit once and keeps running; a vault holds a context while a job's memory is copied.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from gpucr.driver.gpus import gpu_processes

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_INITIALIZED, _CONTEXT = "gpucr-cuda", "gpucr-vault"
_signs: list[int] = []


@contextlib.contextmanager
def initializing(*, is_first: bool) -> Iterator[None]:
    """In the block this process calls cuInit for gpucr, and is marked so; it sees all GPUs of the machine.

    CUDA_VISIBLE_DEVICES is about the caller's own programs: a job may have been started with another one.
    ``is_first``: no cuInit before. A program that has used CUDA before is a job itself, and gets no mark.
    """
    if is_first and not _signs:
        _signs.append(_sign(_INITIALIZED))
    hidden = os.environ.pop(_VISIBLE, None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[_VISIBLE] = hidden


def note_context() -> int:
    """Mark that this process has a context for gpucr. Returns the descriptor to close afterwards."""
    return _sign(_CONTEXT)


def is_gpucrs(pid: int, *, had_memory: bool) -> bool:
    """Whether a process's CUDA use is only gpucr's own, if the caller may see that.

    ``had_memory``: it had device memory when the caller asked NVML. A program that calls gpucr and later CUDA has some
    without a vault. Raises DriverUnavailable.
    """
    signs = _names_of(pid)
    if _INITIALIZED not in signs:
        return False
    # A vault may have closed since.
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
