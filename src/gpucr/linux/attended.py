"""See that a process is killed before the kernel closes what it has open, and before it detaches what it traces.

The kernel does both in this order, with other work in between. So for about 3 ms after CRIU is killed, a thread in
which it runs code of its own finds its socket closed, returns to the program, and runs it, although the process is
stopped (seen with CRIU 4.2.1 on Linux 6.18). A tracer can hold the dying process before all of that.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import threading
from collections.abc import Callable

from gpucr.linux import libc

_CONT, _GET_EVENT_MESSAGE, _SEIZE, _LISTEN = 7, 0x4201, 0x4206, 0x4208  # include/uapi/linux/ptrace.h
_O_TRACEEXIT, _EVENT_EXIT, _EVENT_STOP = 1 << 6, 6, 128
_WALL = 0x40000000  # include/uapi/linux/wait.h
_STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

_ptrace = libc.function("ptrace", ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, result=ctypes.c_long)


def begin_to_attend(pid: int, on_killed: Callable[[], None]) -> bool:
    """As `attend`, in a thread of its own. Returns whether the process is traced now."""
    answers: queue.Queue[bool] = queue.Queue()
    try:
        threading.Thread(target=attend, args=(pid, answers.put, on_killed), daemon=True).start()
    except RuntimeError:  # no memory for one
        return False
    return answers.get()


def attend(pid: int, on_seized: Callable[[bool], None], on_killed: Callable[[], None]) -> None:
    """Trace a process of one thread until it has ended.

    ``on_seized`` is called first, with whether it can be traced; if not, that was all. ``on_killed`` is called if it
    dies of a signal, before anything of it is released, and may take its time.
    """
    if _ptrace(_SEIZE, pid, None, _O_TRACEEXIT) < 0:
        on_seized(False)
        return
    on_seized(True)
    while True:
        try:
            _, status = os.waitpid(pid, _WALL)
        except ChildProcessError:
            return
        if not os.WIFSTOPPED(status):
            return
        event, number = status >> 16, os.WSTOPSIG(status)
        if event == _EVENT_EXIT and _is_by_signal(pid):
            on_killed()
        if event == _EVENT_STOP and number in _STOPS:
            _ptrace(_LISTEN, pid, None, None)
        else:
            _ptrace(_CONT, pid, None, 0 if event else number)


def _is_by_signal(pid: int) -> bool:
    status = ctypes.c_ulong()
    _ptrace(_GET_EVENT_MESSAGE, pid, None, ctypes.addressof(status))
    return os.WIFSIGNALED(status.value)
