"""Processes whose interposer does not talk to this gpucr, so that a suspend went the driver's way."""

from __future__ import annotations

from gpucr.gpu_state.interposed.host_copy import FILE_NAME
from gpucr.gpu_state.interposed.shared import SHARES_NAME
from gpucr.interposer.client import LOOK_S, Agent
from gpucr.interposer.protocol import BadAnswer, Refused
from gpucr.linux.processes import open_files

_KEPT = tuple(f"/{name} (deleted)" for name in (FILE_NAME, f"memfd:{SHARES_NAME}"))


def left_to_driver(pid: int) -> bool:
    """Whether the driver alone brings back this interposed process: it keeps nothing, and its agent does not answer.

    It speaks another version of the protocol, hangs, or answers nonsense. What a process keeps is seen from outside.
    """
    try:
        if any(file.target in _KEPT for file in open_files(pid)):
            return False
    except PermissionError:
        return False
    try:
        with Agent(pid, answer_s=LOOK_S, looks=True) as agent:
            agent.status()
    except (Refused, BadAnswer, OSError):
        return True
    return False
