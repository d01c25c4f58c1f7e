"""Devices that a process has open only because it was forked from one that uses them (how it lets go: let_go.py).

A program that forks after CUDA has started (for the workers of torch's DataLoader) leaves its children all descriptors
and most mappings of ``/dev/nvidia*``. They are of no use there: libcuda refuses all work in a child of fork. At a
checkpoint the driver closes the parent's descriptors and frees what is behind them; the children's stay open on
nothing, for ever (measured on driver 580), and CRIU cannot dump them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from msgspec import Struct

from gpucr.linux import open_file, processes
from gpucr.model import ProcessInfo

NVIDIA_DEVICE = re.compile(r"^/dev/nvidia")
"""What the driver's descriptors and mappings are of."""

UNDUMPABLE_KINDS = ("userfaultfd", "perf_event", "bpf-prog", "kvm-vm", "kvm-vcpu", "fscontext", "landlock")
"""Other descriptors that CRIU cannot dump, as the kernel names them."""

UNDUMPABLE = re.compile(rf"^anon_inode:\[?({'|'.join(UNDUMPABLE_KINDS)})")
"""What they lead to in ``/proc/PID/fd``."""


class InheritedDevices(Struct, frozen=True):
    """The descriptors of a process that are an owner's too: opened once, before the fork."""

    process: ProcessInfo
    owner_pid: int
    fds: tuple[int, ...]


def find_inherited(tree: Iterable[ProcessInfo], owner_pids: Iterable[int]) -> tuple[InheritedDevices, ...]:
    """What the processes of the tree have of the devices of the owners, which are in the tree too and run.

    Only descriptors that CRIU cannot dump are looked at. Needs ptrace access (read) to both sides; where it is refused,
    where a process ends meanwhile, and on other machines than x86-64, nothing is found.
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
        return open_file.order(pid, fd, other_pid, fd) == 0
    except OSError:
        return False
