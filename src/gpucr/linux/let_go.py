"""How a process lets go of devices that it has inherited: replaced by itself, under ptrace."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ, PROT_WRITE

from gpucr.linux import memory, processes
from gpucr.linux.inherited import NVIDIA_DEVICE, InheritedDevices, devices_of, is_same_file
from gpucr.linux.injection import CLOSE, DUP3, MAP_FIXED, MAP_NORESERVE, MMAP, OPEN, run_syscall, scratch_address
from gpucr.linux.ptrace import TracedThread

_NOTHING = b"/dev/null\0"
_LIMIT_S = 5.0


def let_go(inherited: Iterable[InheritedDevices]) -> dict[int, OSError]:
    """Replace what the owners have closed since, and what is nobody's: descriptors by /dev/null, mappings by memory.

    A number that were free could become another file's, and a late ``close`` or ``ioctl`` of the process would meet
    that one. All processes at once. Returns the error of each (by pid) that kept it from being done there: tracing is
    refused (PermissionError), or the process does not stop within 5 s (TimeoutError). One that has ended is no error.
    """
    tasks = [_Task(each) for each in inherited]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    return {task.pid: task.error for task in tasks if task.error is not None}


class _Task(threading.Thread):
    """One process's. All of the tracing has to be done by one OS thread, and ends with it."""

    def __init__(self, inherited: InheritedDevices) -> None:
        super().__init__(name=f"let-go-{inherited.process.pid}", daemon=True)
        self.pid = inherited.process.pid
        self._inherited = inherited
        self.error: OSError | None = None

    def run(self) -> None:
        try:
            thread = TracedThread.seize(self.pid, _LIMIT_S)
            try:
                _replace(thread, self._inherited)
            finally:
                thread.detach(thread.last_stop.signal)
        except OSError as error:
            # PermissionError is also the kernel's answer for a process that is ending, or a zombie.
            if processes.keeps_running(self._inherited.process.id):
                self.error = error


def _replace(thread: TracedThread, inherited: InheritedDevices) -> None:
    pid, owner_pid = inherited.process.pid, inherited.owner_pid
    # Meanwhile the process may have closed some itself, and have other files at their numbers.
    still_open = devices_of(pid)
    stale = sorted(still_open & set(inherited.of_nobody))
    if owner_pid is not None:
        owned = still_open & set(inherited.fds) & devices_of(owner_pid)
        stale += sorted(still_open & set(inherited.fds) - {fd for fd in owned if is_same_file(pid, owner_pid, fd)})
    if stale:
        mapped = [each for each in memory.read_maps(pid) if NVIDIA_DEVICE.match(each.path)]
        replace_devices(thread, stale, mapped)


def replace_devices(thread: TracedThread, fds: Iterable[int], mappings: Iterable[memory.Mapping]) -> None:
    """Replace a stopped thread's descriptors by /dev/null, and its mappings by memory. Raises OSError."""
    scratch = scratch_address(thread)
    thread.write_memory(scratch, _NOTHING)
    nothing = run_syscall(thread, OPEN, scratch, os.O_RDWR | os.O_CLOEXEC, 0)
    try:
        for fd in fds:
            run_syscall(thread, DUP3, nothing, fd, os.O_CLOEXEC)
    finally:
        run_syscall(thread, CLOSE, nothing)
    flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
    for mapping in mappings:
        size_bytes = mapping.end - mapping.start
        run_syscall(thread, MMAP, mapping.start, size_bytes, PROT_READ | PROT_WRITE, flags, -1, 0)
