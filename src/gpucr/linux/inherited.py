"""Devices that a process has open only because it was forked from a process that uses them, and how to close them.

When a program forks after CUDA has started (as torch's DataLoader does for its workers), its children inherit all
descriptors and most mappings of ``/dev/nvidia*``. They are useless there: libcuda refuses all work in a forked child.
At a checkpoint the driver closes the parent's descriptors and frees what is behind them; the children's stay open
forever (measured on driver 580), and CRIU cannot dump them.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ, PROT_WRITE

from msgspec import Struct

from gpucr.linux import memory, open_file, processes
from gpucr.linux.injection import CLOSE, DUP3, MAP_FIXED, MAP_NORESERVE, MMAP, OPEN, run_syscall, scratch_address
from gpucr.linux.ptrace import TracedThread
from gpucr.model import ProcessInfo

NVIDIA_DEVICE = re.compile(r"^/dev/nvidia")
"""Path prefix of the driver's descriptors and mappings."""

UNDUMPABLE_KINDS = ("userfaultfd", "perf_event", "bpf-prog", "kvm-vm", "kvm-vcpu", "fscontext", "landlock")
"""Other descriptors that CRIU cannot dump, as the kernel shows them."""

UNDUMPABLE = re.compile(rf"^anon_inode:\[?({'|'.join(UNDUMPABLE_KINDS)})")
"""What they lead to in ``/proc/PID/fd``."""

_NOTHING = b"/dev/null\0"
_LIMIT_S = 5.0


class InheritedDevices(Struct, frozen=True):
    """A process's descriptors that it shares with an owner: opened once, before the fork."""

    process: ProcessInfo
    owner_pid: int
    fds: tuple[int, ...]


def find_inherited(tree: Iterable[ProcessInfo], owner_pids: Iterable[int]) -> tuple[InheritedDevices, ...]:
    """The owners' devices that other processes of the tree have inherited. Owners are in the tree too, and running.

    Looks only at descriptors that CRIU cannot dump. Needs ptrace access (read) to both sides; if it is refused, if a
    process ends meanwhile, and on other machines than x86-64, nothing is found.
    """
    tree, owners = tuple(tree), set(owner_pids)
    if not owners or os.uname().machine != "x86_64":
        return ()
    devices = {process.pid: _devices(process.pid) for process in tree}
    found: list[InheritedDevices] = []
    for process in tree:
        if process.pid in owners or not devices[process.pid]:
            continue
        for owner in owners & devices.keys():
            shared = devices[process.pid] & devices[owner]
            fds = tuple(fd for fd in sorted(shared) if _is_same_file(process.pid, owner, fd))
            if fds:
                found.append(InheritedDevices(process, owner, fds))
                break
    return tuple(found)


def let_go(inherited: Iterable[InheritedDevices]) -> dict[int, OSError]:
    """Replace what the owners have closed since: descriptors by /dev/null, and mappings of NVIDIA devices by memory.

    A freed number could be reused for another file, and a late ``close`` or ``ioctl`` of the process would hit that.
    Handles all processes at once. Returns, by pid, the errors that prevented it: tracing is refused (PermissionError),
    or the process does not stop within 5 s (TimeoutError). A process that has ended is no error.
    """
    tasks = [_Task(each) for each in inherited]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    return {task.pid: task.error for task in tasks if task.error is not None}


class _Task(threading.Thread):
    """Do it in one process. One OS thread has to do all of the tracing, and the tracing ends with it."""

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
            if processes.goes_on(self._inherited.process.id):
                self.error = error


def _replace(thread: TracedThread, inherited: InheritedDevices) -> None:
    pid, owner_pid = inherited.process.pid, inherited.owner_pid
    # The process may have closed some itself meanwhile, and reused their numbers.
    still_open, open_in_owner = _devices(pid) & set(inherited.fds), _devices(owner_pid)
    stale = sorted(fd for fd in still_open if not (fd in open_in_owner and _is_same_file(pid, owner_pid, fd)))
    if not stale:
        return
    scratch = scratch_address(thread)
    thread.write_memory(scratch, _NOTHING)
    nothing = run_syscall(thread, OPEN, scratch, os.O_RDWR | os.O_CLOEXEC, 0)
    try:
        for fd in stale:
            run_syscall(thread, DUP3, nothing, fd, os.O_CLOEXEC)
    finally:
        run_syscall(thread, CLOSE, nothing)
    flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
    for mapping in memory.read_maps(pid):
        if NVIDIA_DEVICE.match(mapping.path):
            size_bytes = mapping.end - mapping.start
            run_syscall(thread, MMAP, mapping.start, size_bytes, PROT_READ | PROT_WRITE, flags, -1, 0)


def _devices(pid: int) -> set[int]:
    """The descriptors that CRIU cannot dump."""
    try:
        opened = processes.open_files(pid)
    except PermissionError:
        return set()
    return {file.fd for file in opened if NVIDIA_DEVICE.match(file.target) or UNDUMPABLE.match(file.target)}


def _is_same_file(pid: int, other_pid: int, fd: int) -> bool:
    """Whether this number is the same open file in both: opened once, and inherited."""
    try:
        return open_file.order(pid, fd, other_pid, fd) == 0
    except OSError:
        return False
