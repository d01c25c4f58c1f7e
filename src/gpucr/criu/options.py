"""CRIU's settings, chosen for a job by looking at it in /proc.

Options that cost nothing when unneeded are always on: a file lock or a connection that appears between inspection and
freeze must not fail the dump. Only what changes the outcome is decided: whether the job depends on a terminal session
outside it, how large its deleted files are, and how its network is locked.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from gpucr.errors import Unsupported
from gpucr.linux import proc_text
from gpucr.quantities import format_bytes
from gpucr.records import Record

if TYPE_CHECKING:
    from gpucr.criu.install import CriuInstall

NetworkLock = Literal["nftables", "iptables", "skip"]

GHOST_LIMIT_DEFAULT_BYTES = 1 << 20  # CRIU's default
GHOST_LIMIT_MAX_BYTES = (1 << 32) - 1  # the request's field has 32 bits

# Field `st` of /proc/net/tcp: states without a connection for CRIU to keep.
_TCP_WITHOUT_CONNECTION = {"06", "07", "0A"}  # TIME_WAIT, CLOSE, LISTEN

# Where a process has only these, the tables are not read: the kernel goes through the whole machine's, for 4 ms each.
_PROTOCOLS_WITHOUT_CONNECTION = (b"UNIX", b"UDP", b"NETLINK", b"PACKET")

# Mapped files without a name that CRIU keeps by other means than as ghost files.
_UNNAMED_MEMORY = ("/memfd:", "/dev/zero", "/SYSV", "anon_inode:", "/[aio]")


class DumpOptions(Record, frozen=True):
    """CRIU's settings for one dump. The snapshot records them: the restore needs the same.

    ``ghost_limit_bytes``: the largest deleted file that is still open or mapped and goes into the images.
    """

    leave_running: bool
    shell_job: bool
    ghost_limit_bytes: Annotated[int, Meta(ge=0, le=GHOST_LIMIT_MAX_BYTES)]
    network_lock: NetworkLock
    tcp_established: bool = True
    file_locks: bool = True
    link_remap: bool = True
    ext_unix_sk: bool = True


class RestoreOptions(Struct, frozen=True):
    """CRIU's settings for one restore."""

    shell_job: bool
    network_lock: NetworkLock
    tcp_established: bool = True
    file_locks: bool = True
    link_remap: bool = True
    ext_unix_sk: bool = True

    @classmethod
    def from_dump(cls, dumped: DumpOptions) -> RestoreOptions:
        """The settings that fit images which were dumped with ``dumped``."""
        return cls(
            shell_job=dumped.shell_job,
            network_lock=dumped.network_lock,
            tcp_established=dumped.tcp_established,
            file_locks=dumped.file_locks,
            link_remap=dumped.link_remap,
            ext_unix_sk=dumped.ext_unix_sk,
        )


def choose_dump_options(
    pids: Sequence[int],
    *,
    leave_running: bool,
    install: CriuInstall | None = None,
    other_root_pids: Sequence[int] = (),
) -> DumpOptions:
    """The settings for a tree whose root is ``pids[0]``, or for all trees of a job. Only reads /proc.

    ``install`` (default: the one that `find_criu` finds) decides how to lock the network, if there are connections.
    Raises Unsupported if a deleted file is larger than CRIU's limit can say. A process that ends meanwhile is skipped.
    """
    return DumpOptions(
        leave_running=leave_running,
        shell_job=is_shell_job(pids[0], pids) or any(is_shell_job(each, [each]) for each in other_root_pids),
        ghost_limit_bytes=_ghost_limit(pids),
        network_lock=_choose_network_lock(install) if has_connections(pids) else "skip",
    )


def is_shell_job(root_pid: int, pids: Sequence[int]) -> bool:
    """Whether the leader of the tree's session is outside it. Another tree counts as outside: another CRIU dumps it."""
    try:
        return os.getsid(root_pid) not in pids
    except ProcessLookupError:
        return False


def _ghost_limit(pids: Sequence[int]) -> int:
    """Twice the largest deleted file, since it may grow before the freeze."""
    largest_bytes = max((size for pid in pids for size in deleted_file_sizes(pid)), default=0)
    if largest_bytes > GHOST_LIMIT_MAX_BYTES:
        raise Unsupported(
            f"a deleted file of {format_bytes(largest_bytes)} is in use, and CRIU keeps those of up to 4.0 GiB",
            hint="close the file, or give it a name",
            code="GPUCR-GHOST-TOO-LARGE",
        )
    return min(max(2 * largest_bytes, GHOST_LIMIT_DEFAULT_BYTES), GHOST_LIMIT_MAX_BYTES)


def deleted_file_sizes(pid: int) -> Iterator[int]:
    """Sizes in bytes of the regular files that ``pid`` has open or mapped and whose last name is gone."""
    for path, target in _links(f"/proc/{pid}/fd"):
        if target.endswith(" (deleted)") and not target.startswith(_UNNAMED_MEMORY):
            yield from _size_if_nameless(path)
    for line in _lines(f"/proc/{pid}/maps"):
        if not line.endswith(" (deleted)"):
            continue
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and not parts[5].startswith(_UNNAMED_MEMORY):
            try:
                yield from _size_if_nameless(f"/proc/{pid}/map_files/{_map_file_name(parts[0])}")
            except PermissionError:  # needs CAP_CHECKPOINT_RESTORE: at least what is mapped
                start, end = (int(address, 16) for address in parts[0].split("-"))
                yield int(parts[2], 16) + end - start


def _map_file_name(address_range: str) -> str:
    """`maps` pads addresses with zeros, `map_files` does not."""
    return "-".join(f"{int(address, 16):x}" for address in address_range.split("-"))


def _size_if_nameless(path: str) -> Iterator[int]:
    try:
        status = os.stat(path)
    except PermissionError:
        raise
    except OSError:
        return
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
        yield status.st_size


def has_connections(pids: Sequence[int]) -> bool:
    """Whether a process of ``pids`` holds a TCP socket with a connection (established, half-closed, half-open)."""
    sockets: set[str] = set()
    namespaces: dict[str, int] = {}
    for pid in pids:
        sockets.update(
            target[8:-1]
            for path, target in _links(f"/proc/{pid}/fd")
            if target.startswith("socket:[") and not _protocol(path).startswith(_PROTOCOLS_WITHOUT_CONNECTION)
        )
        try:
            namespaces[os.readlink(f"/proc/{pid}/ns/net")] = pid
        except OSError:
            continue
    if not sockets:
        return False
    return any(not sockets.isdisjoint(_connected_inodes(pid)) for pid in namespaces.values())


def _protocol(socket_link: str) -> bytes:
    """The kernel's name for it, as lsof asks for; none where it does not tell."""
    try:
        return os.getxattr(socket_link, "system.sockprotoname")
    except OSError:
        return b""


def _connected_inodes(pid: int) -> Iterator[str]:
    """Inodes of connected TCP sockets in the network namespace of ``pid`` (/proc/net/tcp: state in 4, inode in 10)."""
    for table in ("tcp", "tcp6"):
        for line in _lines(f"/proc/{pid}/net/{table}")[1:]:
            columns = line.split()
            if len(columns) > 9 and columns[3] not in _TCP_WITHOUT_CONNECTION:
                yield columns[9]


def _choose_network_lock(install: CriuInstall | None) -> NetworkLock:
    """nftables if CRIU and the kernel have it (no tool needed), else iptables if the tool is there.

    None for an ordinary user's CRIU: connections inside the job are idle anyway when all of it is stopped.
    """
    from gpucr.criu.install import find_criu, has_feature  # not needed for reading a snapshot

    criu = install or find_criu()
    if criu.is_unprivileged:
        # It tries nftables in a new network namespace, which needs CAP_SYS_ADMIN (seen with 4.2.1), and programs that
        # it starts, such as iptables-restore, do not inherit its file capabilities.
        return "skip"
    if has_feature(criu, "network_lock_nftables"):
        return "nftables"
    return "iptables" if shutil.which("iptables-restore") else "skip"


def _links(folder: str) -> Iterator[tuple[str, str]]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        path = f"{folder}/{name}"
        try:
            yield path, os.readlink(path)
        except OSError:
            continue


def _lines(path: str) -> list[str]:
    try:
        return proc_text.lines(path)
    except OSError:
        return []
