"""What a job needs outside its processes: unchanged files, free ports, connections' peers."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from gpucr.diagnosis.preflight.databases import spared_by_rewind
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import outside as facts
from gpucr.diagnosis.preflight.support.fact import Fact
from gpucr.linux import file_locks, files_in_use, processes, sock_diag
from gpucr.linux.namespaces import namespace_id
from gpucr.linux.one_look import OneLook
from gpucr.linux.sock_diag import TcpSocket
from gpucr.model import Connection, Endpoint, FileLock, Job, JobFile
from gpucr.network.filters import find_method
from gpucr.network.kept import find

FilesMode = Literal["keep", "rewind"]
"""Files that the job was writing and whose size has changed: left alone, or cut back to the old size."""

TcpMode = Literal["close", "keep"]
"""Connections whose peer is outside the job: closed in the restored job, or restored."""

_SHOWN, _IPV6 = 3, 6


def check_outside_connections(
    job: Job, tcp: TcpMode = "close", *, left_running: bool = False, look: OneLook | None = None
) -> list[Finding]:
    """Connections of a job that is to be dumped to programs outside it, and those that no restore can make again."""
    sockets = sock_diag.sockets_of(job.pids, look)
    found = sock_diag.outside_connections(sockets)
    closed = {each.inode for each in found} if tcp == "close" else ()
    if impossible := check_link_local([each for each in sockets if each.is_connection and each.inode not in closed]):
        return impossible
    if tcp == "keep":
        elsewhere = [pid for pid in job.pids if _is_in_another_network(pid)]
        if elsewhere:
            return [facts.KEPT_ELSEWHERE.seen(f"/proc/{elsewhere[0]}/ns/net", elsewhere[0], pid=elsewhere[0])]
        method, why = find_method()
        if method is None:
            return [facts.NO_FILTER.seen(why)]
    return found_outside([each.connection for each in found], tcp, left_running=left_running)


def check_link_local(restored: Collection[TcpSocket]) -> list[Finding]:
    """Connections that are to be restored and cannot be: CRIU binds them without the interface (seen with 4.2.1)."""
    ends = [ipaddress.ip_address(each.local.address) for each in restored]
    count = sum(each.version == _IPV6 and each.is_link_local for each in ends)
    if not count:
        return []
    return [facts.LINK_LOCAL.seen("sock_diag", connections=_count(count, "connection"))]


def found_outside(connections: Sequence[Connection], tcp: TcpMode, *, left_running: bool) -> list[Finding]:
    """What a dump and a restore do to these connections to programs outside the job."""
    if not connections:
        return []
    fact = facts.CONNECTIONS if left_running else facts.CONNECTIONS_WAIT if tcp == "keep" else facts.CONNECTIONS_END
    count = _count(len(connections), "connection")
    return [fact.seen(_some([str(each) for each in connections]), connections=count)]


def check_kept_connections(
    connections: Sequence[Connection], tcp: TcpMode, kept: str | None, *, in_our_network: bool = True
) -> list[Finding]:
    """What happens to a snapshot's outside connections. ``kept``: the record that the dump made, if it kept them.

    ``in_our_network``: the job will be in the machine's network, as it was.
    """
    if not connections:
        return []
    some = _some([str(each) for each in connections])
    count = _count(len(connections), "connection")
    if tcp == "close":
        return [facts.CONNECTIONS_CLOSED.seen(some, connections=count)]
    if not in_our_network:
        return [facts.CONNECTIONS_APART.seen("--isolate, or the job had one", connections=count)]
    if kept is None:
        return [facts.CONNECTIONS_ENDED.seen(some, connections=count)]
    if find(kept) is None:
        return [facts.CONNECTIONS_ABSENT.seen(f"no record {kept} on this machine", connections=count)]
    return [facts.CONNECTIONS_KEPT.seen(some, connections=count)]


def check_ports(endpoints: Collection[Endpoint]) -> list[Finding]:
    """Whether other programs occupy the ports of the job's sockets."""
    if not endpoints:
        return []
    taken = sock_diag.in_the_way([each for each in sock_diag.tcp_sockets() if not each.is_left_over], endpoints)
    if not taken:
        return []
    owners = _owners({each.inode for each in taken})
    return [
        facts.PORT_IN_USE.seen(
            f"by process {owners[each.inode]}" if each.inode in owners else f"inode {each.inode} of sock_diag",
            owners.get(each.inode),
            port=endpoint,
        )
        for endpoint, each in {each.local: each for each in taken}.items()
    ]


def check_files(
    files: Sequence[JobFile], folders: Sequence[str], mode: FilesMode, saved: Collection[str] = ()
) -> list[Finding]:
    """Check the job's files and folders as they are now. Contents are not compared.

    Databases, which `check_changed_databases` covers, are reported only if they are shorter now. ``saved``: files that
    it covers in any case.
    """
    missing = [folder for folder in folders if not os.path.isdir(folder)]
    found: list[Finding] = []
    changed: list[tuple[JobFile, int]] = []
    databases = spared_by_rewind(files)
    for file in [file for file in files if file.path not in saved]:
        size_bytes = _size(file.path)
        if size_bytes is None:
            missing.append(file.path)
        elif size_bytes != file.size_bytes and (file.path not in databases or size_bytes < file.size_bytes):
            changed.append((file, size_bytes))
    if missing:
        count = _count(len(missing), "file or folder", "files or folders")
        found.append(facts.FILES_MISSING.seen(_some(missing), files=count))
    found += [_judge(file, size_bytes, mode) for file, size_bytes in changed]
    if mode == "rewind":
        found += _check_writers([file.path for file, size_bytes in changed if _is_cut_back(file, size_bytes)])
    return found


def check_locks(locks: Sequence[FileLock]) -> list[Finding]:
    """Whether other programs hold the locks on files that the job had. CRIU waits for them."""
    found: list[Finding] = []
    for path in dict.fromkeys(lock.path for lock in locks):
        holders = (file_locks.holder_of(lock) for lock in locks if lock.path == path)
        pid = next((holder for holder in holders if holder is not None), None)
        if pid is not None:
            holder = f"process {pid} ({_name(pid)})" if pid else "a process that cannot be seen from here"
            found.append(facts.LOCK_HELD.seen("fcntl(2), flock(2), /proc/locks", pid or None, file=path, holder=holder))
    return found


def check_shared_files(in_use: Mapping[str, tuple[int, int]]) -> list[Finding]:
    """Whether programs use files of shared memory that are about to be replaced. ``in_use``: device and inode."""
    if not in_use:
        return []
    owners = files_in_use.holders(set(in_use.values()))
    return [
        facts.SHARED_MEMORY_IN_USE.seen(
            f"by process {owners[inode]} ({_name(owners[inode])})", owners[inode], file=name
        )
        for name, inode in in_use.items()
        if inode in owners
    ]


def _judge(file: JobFile, size_bytes: int, mode: FilesMode) -> Finding:
    grown = size_bytes > file.size_bytes
    return _kind_of_change(file, mode, grown=grown).seen(
        f"{size_bytes} bytes, {file.size_bytes} then",
        file=file.path,
        change=f"{abs(size_bytes - file.size_bytes)} bytes {'longer' if grown else 'shorter'}",
    )


def _kind_of_change(file: JobFile, mode: FilesMode, *, grown: bool) -> Fact:
    if not file.is_written:
        return facts.PROGRAM_CHANGED if file.is_mapped else facts.READ_ONLY_CHANGED
    if file.is_mapped and not grown:
        return facts.MAPPED_SHORTER
    if mode == "keep":
        return facts.KEPT_LONGER if grown else facts.KEPT_SHORTER
    return facts.CUT_BACK if grown else facts.REWIND_SHORTER


def _is_cut_back(file: JobFile, size_bytes: int) -> bool:
    return file.is_written and size_bytes > file.size_bytes


def _check_writers(paths: Sequence[str]) -> list[Finding]:
    inodes = {}
    for path in paths:
        status = os.stat(path)
        inodes[(status.st_dev, status.st_ino)] = path
    return [
        facts.REWIND_IN_USE.seen(f"by process {pid} ({_name(pid)})", pid, file=inodes[inode])
        for inode, pid in (files_in_use.holders(set(inodes)) if inodes else {}).items()
    ]


def _size(path: str) -> int | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _is_in_another_network(pid: int) -> bool:
    try:
        return namespace_id(pid, "net") != namespace_id("self", "net")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def _owners(inodes: Collection[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for pid in processes.all_pids():
        with contextlib.suppress(PermissionError):
            for inode in sock_diag.inodes_of([pid]):
                if inode in inodes:
                    found.setdefault(inode, pid)
    return found


def _name(pid: int) -> str:
    status = processes.read_stat(pid)
    return status.name if status is not None else "ended"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _some(items: Sequence[str]) -> str:
    rest = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + rest
