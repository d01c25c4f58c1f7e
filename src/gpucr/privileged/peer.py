"""The process at the other end of the socket, and whether the helper serves it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Mapping

from msgspec import Struct

from gpucr.linux.capabilities import Capabilities
from gpucr.linux.credentials import Credentials
from gpucr.privileged import session
from gpucr.privileged.rights import Refused, Rights, label_of, require_no_special, rights_of
from gpucr.privileged.session import Session

_SO_PEERPIDFD = 77  # include/uapi/asm-generic/socket.h, from Linux 6.5 on
_CREDENTIALS = struct.Struct("3i")
KINDS = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")
"""Namespaces that the peer and its jobs must share with the helper, or with a sandbox that the helper has made.

(Not the time namespace: CRIU gives a job its own.)
"""


class Peer(Struct, frozen=True):
    """``supplementary``: its supplementary groups. ``label``: its LSM label, empty for none."""

    pid: int
    uid: int
    gid: int
    supplementary: frozenset[int]
    bounding: int
    label: str
    session: Session

    @property
    def groups(self) -> frozenset[int]:
        """All its groups."""
        return self.supplementary | {self.gid}

    def credentials(self, *, no_new_privs: bool = False) -> Credentials:
        """Credentials for a process that is to become the peer's."""
        capabilities = Capabilities(
            permitted=0,
            effective=0,
            inheritable=0,
            bounding=self.bounding,
            ambient=0,
            is_root=False,
            no_new_privs=no_new_privs,
        )
        return Credentials((self.uid,) * 3, (self.gid,) * 3, tuple(sorted(self.supplementary)), capabilities)


def uid_of(connected: socket.socket) -> int:
    """The uid of the connecting process, as the kernel recorded it at connect time."""
    return _credentials(connected)[1]


def held(connected: socket.socket) -> tuple[int, int]:
    """The connecting process: its pid, and a pidfd that the caller closes. Raises Refused."""
    pid, _, _ = _credentials(connected)
    if pid <= 0:
        raise Refused("the caller is in another pid namespace")
    return pid, _pidfd(connected, pid)


def require_alive(pidfd: int) -> None:
    """Raise Refused if the process has ended: its pid may be another's by now."""
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except OSError as e:
        raise Refused("the caller has ended") from e


def _credentials(connected: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


def of(connected: socket.socket) -> Peer:
    """The connecting process, as the kernel recorded it at connect time, with its current rights. Raises Refused."""
    _, uid, gid = _credentials(connected)
    if uid == 0:
        raise Refused("root needs no helper")
    pid, pidfd = held(connected)
    try:
        rights, label = rights_of(pid, pid), label_of(pid)
        found = session.of(pid)
        require_here(pid, "the caller")
        require_alive(pidfd)  # so all of this was about it
    except OSError as e:
        raise Refused("the caller has ended") from e
    finally:
        os.close(pidfd)
    peer = Peer(pid, uid, gid, rights.groups, rights.bounding, label, found)
    _require_ordinary(rights, peer)
    return peer


def require_here(pid: int, name: str, instead: Mapping[str, int] | None = None) -> None:
    """Raise Refused unless the process shares the helper's view of the machine; OSError if it has ended.

    ``instead``: namespaces (inode numbers) that it must be in instead of the helper's own.
    """
    for kind in KINDS:
        wanted = (instead or {}).get(kind) or os.stat(f"/proc/self/ns/{kind}").st_ino
        if os.stat(f"/proc/{pid}/ns/{kind}").st_ino != wanted:
            raise Refused(f"{name} is in a namespace of its own ({kind})")
    if not os.path.samestat(os.stat(f"/proc/{pid}/root"), os.stat("/")) or os.readlink(f"/proc/{pid}/root") != "/":
        raise Refused(f"{name} has a root folder of its own")


def _require_ordinary(rights: Rights, peer: Peer) -> None:
    require_no_special(rights, peer.uid, peer.groups, peer.bounding, "the caller")
    if rights.no_new_privs or rights.has_filter:
        raise Refused("the caller has no_new_privs or a system call filter, which a job would get out of by this")


def _pidfd(connected: socket.socket, pid: int) -> int:
    with contextlib.suppress(OSError):
        return connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    try:
        return os.pidfd_open(pid)
    except OSError as e:
        raise Refused("the caller has ended") from e
