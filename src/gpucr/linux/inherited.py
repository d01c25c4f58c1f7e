"""Devices that a process has open only because it was forked from one that uses them (how it lets go: let_go.py).

When a program forks after CUDA has started (as torch's DataLoader does for its workers), its children inherit all
descriptors and most mappings of ``/dev/nvidia*``. They are useless there: libcuda refuses all work in a forked child.
At a checkpoint the driver closes the parent's descriptors and frees what is behind them; the children's stay open
forever (measured on driver 580), and CRIU cannot dump them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from msgspec import Struct

from gpucr.linux import kcmp, processes
from gpucr.model import ProcessInfo

NVIDIA_DEVICE = re.compile(r"^/dev/nvidia")
"""Path prefix of the driver's descriptors and mappings."""

UNDUMPABLE_KINDS = ("userfaultfd", "perf_event", "bpf-prog", "kvm-vm", "kvm-vcpu", "fscontext", "landlock")
"""Other descriptors that CRIU cannot dump, as the kernel shows them."""

UNDUMPABLE = re.compile(rf"^anon_inode:\[?({'|'.join(UNDUMPABLE_KINDS)})")
"""What they lead to in ``/proc/PID/fd``."""


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
    devices = {process.pid: devices_of(process.pid) for process in tree}
    found: list[InheritedDevices] = []
    for process in tree:
        if process.pid in owners or not devices[process.pid]:
            continue
        for owner in owners & devices.keys():
            shared = devices[process.pid] & devices[owner]
            fds = tuple(fd for fd in sorted(shared) if is_same_file(process.pid, owner, fd))
            if fds:
                found.append(InheritedDevices(process, owner, fds))
                break
    return tuple(found)


def devices_of(pid: int) -> set[int]:
    """The descriptors that CRIU cannot dump."""
    try:
        opened = processes.open_files(pid)
    except PermissionError:
        return set()
    return {file.fd for file in opened if NVIDIA_DEVICE.match(file.target) or UNDUMPABLE.match(file.target)}


def is_same_file(pid: int, other_pid: int, fd: int) -> bool:
    """Whether this number is one open file in both: opened once, and inherited."""
    try:
        return kcmp.file_order(pid, fd, other_pid, fd) == 0
    except OSError:
        return False
