"""What the processes of a job have open and mapped, and which others have the same: gathered in one pass."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from msgspec import Struct

from gpucr.diagnosis.preflight.support.fact import Fact
from gpucr.linux import descriptor_scan, namespaces, proc_text, processes, unix_diag
from gpucr.linux.descriptor_scan import Kin, MemoryKey, is_memory
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import PROC, OpenFile
from gpucr.linux.terminal import MASTER, made_in
from gpucr.linux.unix_diag import UnixSocket
from gpucr.model import Job, ProcessInfo

Files = Mapping[str, list[OpenFile]]
"""Descriptors by what they lead to, as the kernel prints it."""

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_ALONE = frozenset(("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/console"))
"""Devices without a state that two who have them open could share."""
_NOT_SHARED = ("/proc/", "/sys/", "/dev/pts/", "/dev/nvidia", "/dev/tty")
"""Others without a shared state, or looked at elsewhere (terminals, GPUs)."""
_OURS = "/memfd:gpucr-"
"""Memory that gpucr has put into the job, or took out of it, or the simulated driver has."""


class Tie(Struct, frozen=True):
    """Something that process ``pid`` of a tree has in common with the process ``other`` (0: it cannot be seen)."""

    fact: Fact
    pid: int
    other: int
    evidence: str
    values: Mapping[str, Any] = {}

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same tie in two looks."""
        return id(self.fact), self.pid, self.other, self.evidence


class MemoryUse(Struct, frozen=True):
    """One process's use of a file of memory: a mapping, or a descriptor."""

    pid: int
    path: str
    is_writable: bool


Memory = Mapping[MemoryKey, list[MemoryUse]]

Key = TypeVar("Key")
Use = TypeVar("Use", OpenFile, MemoryUse)


class Seen(Struct, frozen=True):
    """One tree, and what it may share. ``others`` are outside the tree: strangers, or of another tree of the job.

    ``pids``: of the tree.
    """

    job: Job
    tree: tuple[ProcessInfo, ...]
    pids: frozenset[int]
    files: Files
    others: Files
    memory: Memory
    others_memory: Memory
    sockets: Mapping[int, UnixSocket]
    kin: Mapping[int, Kin]
    other_kin: Mapping[int, Kin]

    def nearest(self, files: Iterable[OpenFile]) -> OpenFile:
        """Of several who share something, the one to name: of the job, else an ancestor of the tree, before others."""
        above, job = processes.ancestors(self.tree[0].pid) - {1}, set(self.job.pids)
        return min(files, key=lambda file: (file.pid not in job, file.pid not in above, file.pid))


class Look(Struct, frozen=True):
    """Everything about a job, and about others. Made by `look_at`."""

    job: Job
    files: Files
    strangers: Files
    memory: Memory
    strangers_memory: Memory
    sockets: Mapping[int, UnixSocket]
    kin: Mapping[int, Kin]
    stranger_kin: Mapping[int, Kin]

    def trees(self) -> Iterator[Seen]:
        """Each tree; the job's others are strangers to it."""
        for tree in self.job.trees:
            own = frozenset(tree.pids)
            files, other_files = _divided(self.files, self.strangers, own)
            memory, other_memory = _divided(self.memory, self.strangers_memory, own)
            kin = {pid: each for pid, each in self.kin.items() if pid in own}
            other_kin = {pid: each for pid, each in self.kin.items() if pid not in own} | dict(self.stranger_kin)
            yield Seen(
                self.job, tree.processes, own, files, other_files, memory, other_memory, self.sockets, kin, other_kin
            )


def look_at(job: Job, look: OneLook, apart_from: Collection[int] = ()) -> Look:
    """Look at all descriptors and shared memory of a job, and at those of all other processes that may be the same.

    Processes that the caller may not look into seem to share nothing. Changes nothing.
    """
    files = look.files_of(job.pids)
    sockets, peers = _sockets(job, files)
    masters = {f"/dev/pts/{index}" for opened in files.values() for index in made_in(opened)}
    wanted = {target for target in files if may_be_shared(target)} | peers | masters
    memory = _memory(files, job.pids, look)
    stranger_pids = descriptor_scan.other_pids({*job.pids, *apart_from})
    strangers = descriptor_scan.descriptors_of(stranger_pids, wanted) if wanted else {}
    strangers_memory = _memory_of(strangers, memory)
    for key, mappings in descriptor_scan.mappings_of(memory, stranger_pids).items():
        strangers_memory.setdefault(key, []).extend(MemoryUse(m.pid, m.path, m.is_writable) for m in mappings)
    kin, stranger_kin = descriptor_scan.kin_of(job.pids), descriptor_scan.kin_of(stranger_pids)
    return Look(job, files, strangers, memory, strangers_memory, sockets, kin, stranger_kin)


def may_be_shared(target: str) -> bool:
    """Whether what this leads to may have a state in which two processes take part."""
    return target not in _ALONE and (not target.startswith(_NOT_SHARED) or target.endswith(MASTER))


def socket_inode(target: str) -> int:
    """The inode of a socket; 0 for anything else."""
    match = _SOCKET.fullmatch(target)
    return int(match[1]) if match is not None else 0


def link_of(file: OpenFile) -> str:
    """The link in /proc that leads to what the descriptor has open."""
    return f"{PROC}/{file.pid}/fd/{file.fd}"


def ends_of(file: OpenFile) -> tuple[bool, bool]:
    """Whether the descriptor is open for reading, and for writing."""
    with contextlib.suppress(OSError):
        mode = os.lstat(link_of(file)).st_mode
        return bool(mode & stat.S_IRUSR), bool(mode & stat.S_IWUSR)
    return False, False


def fdinfo(file: OpenFile) -> list[str]:
    """The lines of ``/proc/PID/fdinfo/FD`` (proc_pid_fdinfo(5)); none if it has been closed."""
    try:
        return proc_text.lines(f"{PROC}/{file.pid}/fdinfo/{file.fd}")
    except OSError:
        return []


def _sockets(job: Job, files: Files) -> tuple[dict[int, UnixSocket], set[str]]:
    """The job's local sockets, and what leads to those at their other ends."""
    inodes: dict[int, list[int]] = {}  # by a process whose network namespace has them
    network_of: dict[int, int] = {}
    for target, mine in files.items():
        if inode := socket_inode(target):
            with contextlib.suppress(OSError):
                network = namespaces.namespace_id(mine[0].pid, "net")
                inodes.setdefault(network_of.setdefault(network, mine[0].pid), []).append(inode)
    found: dict[int, UnixSocket] = {}
    for pid, there in inodes.items():
        with contextlib.suppress(OSError):  # without CAP_SYS_ADMIN in another network: CRIU decides
            is_here = namespaces.namespace_id(pid, "net") == namespaces.namespace_id("self", "net")
            where = None if is_here else pid
            mine_there = unix_diag.unix_sockets(there, network_of=where)
            peers = {each.peer_inode for each in mine_there.values()} - {0, *mine_there}
            found |= mine_there | unix_diag.unix_sockets(peers, network_of=where)
    return found, {f"socket:[{each.peer_inode}]" for each in found.values() if each.peer_inode}


def _memory(files: Files, pids: Iterable[int], look: OneLook) -> dict[MemoryKey, list[MemoryUse]]:
    """The memory that these processes have mapped or open."""
    found = _memory_of(files)
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or the caller may not look
            for mapping in descriptor_scan.shared_mappings_in(look.mapped(pid).passing, pid):
                if not mapping.path.startswith(_OURS):
                    found.setdefault(mapping.key, []).append(MemoryUse(pid, mapping.path, mapping.is_writable))
    return found


def _memory_of(files: Files, only: Collection[MemoryKey] | None = None) -> dict[MemoryKey, list[MemoryUse]]:
    found: dict[MemoryKey, list[MemoryUse]] = {}
    for target, opened in files.items():
        for file in opened if is_memory(target) and not target.startswith(_OURS) else ():
            with contextlib.suppress(OSError):
                status = os.stat(link_of(file))
                key = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", status.st_ino
                if stat.S_ISREG(status.st_mode) and (only is None or key in only):
                    found.setdefault(key, []).append(MemoryUse(file.pid, target, ends_of(file)[1]))
    return found


def _divided(
    of_job: Mapping[Key, list[Use]], of_strangers: Mapping[Key, list[Use]], own: frozenset[int]
) -> tuple[dict[Key, list[Use]], dict[Key, list[Use]]]:
    """What these processes of the job have, and what all others have of it."""
    mine: dict[Key, list[Use]] = {}
    others: dict[Key, list[Use]] = {}
    for key, uses in of_job.items():
        for use in uses:
            (mine if use.pid in own else others).setdefault(key, []).append(use)
    for key, uses in of_strangers.items():
        others.setdefault(key, []).extend(uses)
    return mine, others
