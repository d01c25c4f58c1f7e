"""Devices that a process has open only because it descends from one that uses them (how it lets go: let_go.py).

When a program forks after CUDA has started (as torch's DataLoader does for its workers), its children inherit all
descriptors and most mappings of ``/dev/nvidia*``. They are useless there: libcuda refuses all work in a forked child.
At a checkpoint the driver closes the parent's descriptors and frees what is behind them; the children's stay open
forever (measured on driver 580), and CRIU cannot dump them. A program that such a child becomes by exec (OpenMPI's
``orted``) has no code that could use them, whoever opened them: its descriptors are nobody's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from msgspec import Struct

from gpucr.linux import kcmp, memory, processes
from gpucr.model import ProcessInfo

NVIDIA_DEVICE = re.compile(r"^/dev/nvidia")
"""Path prefix of the driver's descriptors and mappings."""

_DRIVERS_CODE = re.compile(r"/(libcuda\.so|libnvidia-)[^/]*$")
"""Libraries that a process has mapped if it uses GPUs: NVML is in libnvidia-ml, OpenCL in libnvidia-opencl."""

UNDUMPABLE_KINDS = ("userfaultfd", "perf_event", "bpf-prog", "kvm-vm", "kvm-vcpu", "fscontext", "landlock")
"""Other descriptors that CRIU cannot dump, as the kernel shows them."""

UNDUMPABLE = re.compile(rf"^anon_inode:\[?({'|'.join(UNDUMPABLE_KINDS)})")
"""What they lead to in ``/proc/PID/fd``."""


class InheritedDevices(Struct, frozen=True):
    """A process's descriptors that it shares with an owner, opened once, before the fork; and those of nobody."""

    process: ProcessInfo
    owner_pid: int | None
    fds: tuple[int, ...]
    of_nobody: tuple[int, ...] = ()

    @property
    def all_fds(self) -> tuple[int, ...]:
        """Both kinds."""
        return self.fds + self.of_nobody


def find_inherited(tree: Iterable[ProcessInfo], owner_pids: Iterable[int]) -> tuple[InheritedDevices, ...]:
    """The devices that other processes of the tree have inherited. Owners are in the tree too, and running.

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
        fds: tuple[int, ...] = ()
        owner: int | None = None
        for owner in owners & devices.keys():
            shared = devices[process.pid] & devices[owner]
            fds = tuple(fd for fd in sorted(shared) if is_same_file(process.pid, owner, fd))
            if fds:
                break
        of_nobody = tuple(sorted(_of_nobody(process.pid) - set(fds)))
        if fds or of_nobody:
            found.append(InheritedDevices(process, owner if fds else None, fds, of_nobody))
    return tuple(found)


def _of_nobody(pid: int) -> set[int]:
    """The NVIDIA devices of a process that has no code that uses them."""
    try:
        for mapping in memory.read_maps(pid):
            if _DRIVERS_CODE.search(mapping.path) or NVIDIA_DEVICE.match(mapping.path):
                return set()
        return {file.fd for file in processes.open_files(pid) if NVIDIA_DEVICE.match(file.target)}
    except OSError:  # it has ended, or tracing is refused
        return set()


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
