"""A thread's CPU affinity and I/O priority: kept per thread by the kernel, but not saved by CRIU.

CPU lists use the kernel's format: ``0-3,8`` (cpuset(7), Formats).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from pathlib import Path

from gpucr.linux import cgroups, libc

CPU_LIMIT = 8192
"""The maximum CONFIG_NR_CPUS of x86-64."""
IO_PRIORITY_LIMIT = 1 << 16

_ONLINE = Path("/sys/devices/system/cpu/online")
_CPU_LIST = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", re.ASCII)

_IOPRIO_SET, _IOPRIO_GET = 251, 252  # arch/x86/entry/syscalls/syscall_64.tbl
_IOPRIO_WHO_PROCESS, _IOPRIO_CLASS_SHIFT = 1, 13  # include/uapi/linux/ioprio.h

_ALL_CPUS = b"\xff" * (CPU_LIMIT // 8)
_sched_setaffinity = libc.function("sched_setaffinity", ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p)
_syscall = libc.function("syscall", *(ctypes.c_long,) * 4, result=ctypes.c_long)


def cpus_in(text: str) -> frozenset[int]:
    """The CPUs of a list. Raises ValueError if it is malformed, empty, or has a number of 8192 or more."""
    if not _CPU_LIST.fullmatch(text):
        raise ValueError(f"{text[:80]!r} is not a list of CPUs")
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        start, end = int(first), int(last or first)
        if not start <= end < CPU_LIMIT:
            raise ValueError(f"{part!r} is not a range of CPUs below {CPU_LIMIT}")
        cpus.update(range(start, end + 1))
    return frozenset(cpus)


def cpu_list(cpus: Iterable[int]) -> str:
    """The inverse of `cpus_in`, in its shortest form."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


class UsableCpus:
    """The CPUs that a process gets if it asks for all: online and in its cgroup's cpuset. Each cgroup is read once."""

    def __init__(self) -> None:
        """Raises OSError if the kernel does not report them."""
        self._online = cpus_in(_ONLINE.read_text().strip())
        self._of_cgroups: dict[tuple[str, ...], frozenset[int]] = {}

    def of(self, pid: int) -> frozenset[int]:
        """Those of this process. Raises OSError."""
        cgroup = cgroups.name_of(pid)
        if cgroup not in self._of_cgroups:
            assigned = cgroups.assigned_cpus(pid)
            self._of_cgroups[cgroup] = self._online if assigned is None else self._online & cpus_in(assigned)
        return self._of_cgroups[cgroup]


def allow_all_cpus(tid: int) -> None:
    """Let a thread run on every CPU that its cgroup allows. Raises OSError."""
    libc.check(_sched_setaffinity(tid, len(_ALL_CPUS), _ALL_CPUS), "sched_setaffinity", f"thread {tid}")


def io_priority(tid: int) -> int:
    """The I/O priority of a thread (ioprio_get(2)): class and level in 16 bits, 0: none was set. Raises OSError."""
    value = libc.check(_syscall(_IOPRIO_GET, _IOPRIO_WHO_PROCESS, tid, 0), "ioprio_get", f"thread {tid}")
    # Before Linux 5.18 a thread without one had a level but no class, which ioprio_set(2) refuses.
    return value if value >> _IOPRIO_CLASS_SHIFT else 0


def set_io_priority(tid: int, value: int) -> None:
    """Set the I/O priority of a thread; 0 removes it. Raises OSError."""
    libc.check(_syscall(_IOPRIO_SET, _IOPRIO_WHO_PROCESS, tid, value), "ioprio_set", f"thread {tid}")
