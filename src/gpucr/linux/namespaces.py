"""Namespaces of Linux (namespaces(7)): inspect, enter and create them, and set up what a new one needs.

The calling thread enters or creates a namespace. Only a process with one thread can enter another mount namespace, and
a new pid namespace applies to children only; so gpucr never changes its own. Work in another namespace is done by a
process that `in_namespace` starts there and that enters the others itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_args

from gpucr.linux import libc, netlink, proc_text
from gpucr.linux.work import Work

PROC = Path("/proc")

Kind = Literal["pid", "mnt", "net", "ipc", "time"]
"""Names in ``/proc/PID/ns``. ``time`` is missing there if the kernel has none (CONFIG_TIME_NS, Linux 5.6)."""

KINDS: tuple[Kind, ...] = ("pid", "time", "net", "ipc", "mnt")
"""All, in an order in which they can be entered: another mount namespace may have another ``/proc``."""

_FLAGS: Mapping[Kind, int] = {  # CLONE_NEW* of include/uapi/linux/sched.h
    "pid": 0x20000000,
    "mnt": 0x00020000,
    "net": 0x40000000,
    "ipc": 0x08000000,
    "time": 0x00000080,
}

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_SLAVE = (
    2,
    4,
    8,
    1 << 12,
    1 << 14,
    1 << 19,
)  # include/uapi/linux/mount.h
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1  # include/uapi/linux/sockios.h, if.h
_NS_GET_USERNS = 0xB701  # include/uapi/linux/nsfs.h
_INTERFACE_FLAGS = struct.Struct("16sh22x")  # struct ifreq

_PROTOCOLS = ("ipv4", "ipv6")
_ROUTE = struct.Struct("=8BI")  # struct rtmsg
_NEW_ROUTE, _OUT_INTERFACE = 24, 4  # RTM_NEWROUTE, RTA_OIF of include/uapi/linux/rtnetlink.h
_TABLE_MAIN, _BY_ADMINISTRATOR, _SCOPE_LINK, _UNICAST = 254, 4, 253, 1  # RT_TABLE_MAIN, RTPROT_STATIC, ...

_PID_MAX = Path("/proc/sys/kernel/pid_max")
_TERMINALS, _MASTER, _OF_TERMINALS = "/dev/pts", "/dev/ptmx", ("uid=", "gid=", "mode=", "ptmxmode=")
_LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
_NEXT = 1000  # as many processes and threads may start before a restore has made its own

T = TypeVar("T")

_unshare = libc.function("unshare", ctypes.c_int)
_setns = libc.function("setns", ctypes.c_int, ctypes.c_int)
_mount_of_libc = libc.function(
    "mount", ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p
)


# --- looking -----------------------------------------------------------------------------------------------------


def namespace_id(pid: int | Literal["self"], kind: Kind | Literal["user"]) -> int:
    """The inode number of a process's namespace, which identifies it.

    Raises FileNotFoundError or ProcessLookupError if it has ended, PermissionError if the caller may not look.
    """
    return os.stat(f"{PROC}/{pid}/ns/{kind}").st_ino


def is_same(pid: int, other_pid: int, kind: Kind) -> bool:
    """Whether both are in one namespace. False if one has ended, or the caller may not look."""
    with contextlib.suppress(OSError):
        return namespace_id(pid, kind) == namespace_id(other_pid, kind)
    return False


def kinds_here() -> tuple[Kind, ...]:
    """The kinds of namespaces that gpucr uses and this kernel has."""
    return tuple(kind for kind in get_args(Kind) if (PROC / "self" / "ns" / kind).exists())


class PidNamespace(NamedTuple):  # not a dataclass: importing them makes a keeper start a third slower
    """A pid namespace below the caller's own, by the pid that its first process (pid 1 in it) has here.

    Pids are *outer* (of the caller's namespace) or *inner* (as this namespace's processes see them).
    """

    init_pid: int

    def inner_pid(self, outer_pid: int) -> int | None:
        """The inner pid of a process or thread; None if it has ended or is not inside."""
        level = len(pids_of(self.init_pid)) - 1
        pids = pids_of(outer_pid)
        return pids[level] if level >= 0 and len(pids) > level and self._holds(outer_pid) else None

    def outer_pid(self, inner_pid: int) -> int | None:
        """The outer pid of a process of the namespace; None if there is none."""
        level = len(pids_of(self.init_pid)) - 1
        for name in os.listdir(PROC) if level >= 0 else ():
            if name.isdecimal():
                pids = pids_of(int(name))
                if len(pids) > level and pids[level] == inner_pid and self._holds(int(name)):
                    return int(name)
        return None

    def _holds(self, outer_pid: int) -> bool:
        """Whether the process is in the namespace or in one below it; a pid at its level does not prove that."""
        try:
            wanted = namespace_id(self.init_pid, "pid")
            if namespace_id(outer_pid, "pid") == wanted:
                return True
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        return self.init_pid in _ancestors(outer_pid)


def pids_of(pid: int) -> tuple[int, ...]:
    """The pids of a process or thread, from here inwards (NSpid of proc_pid_status(5)); empty if it has ended."""
    try:
        fields = proc_text.status_fields(PROC / str(pid) / "status")
    except (FileNotFoundError, ProcessLookupError):
        return ()
    return tuple(map(int, fields.get("NSpid", "").split()))


def _ancestors(pid: int) -> Iterator[int]:
    while pid:
        try:
            text = (PROC / str(pid) / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return
        pid = int(text.rpartition(")")[2].split()[1])
        yield pid


@contextlib.contextmanager
def opened(pid: int, *kinds: Kind) -> Iterator[dict[Kind, int]]:
    """Descriptors of a process's namespaces, which stay valid when the process ends.

    Needs ptrace access to it. Raises FileNotFoundError or ProcessLookupError if it has ended, PermissionError.
    """
    with contextlib.ExitStack() as stack:
        fds: dict[Kind, int] = {}
        for kind in kinds:
            fds[kind] = os.open(PROC / str(pid) / "ns" / kind, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fds[kind])
        yield fds


def is_owned_here(fd: int) -> bool:
    """Whether this namespace was made in the caller's own user namespace: so nobody with fewer privileges set it up."""
    try:
        owner = fcntl.ioctl(fd, _NS_GET_USERNS)
    except PermissionError:  # one outside the caller's
        return False
    try:
        return os.fstat(owner).st_ino == namespace_id("self", "user")
    finally:
        os.close(owner)


# --- entering and making -------------------------------------------------------------------------------------------


def enter(fd: int, kind: Kind) -> None:
    """Move the calling thread into the namespace; for ``pid``, its future children. Needs CAP_SYS_ADMIN.

    Only a process with one thread may enter a mount or time namespace; after the former, its root and working folder
    are that namespace's root. Raises OSError.
    """
    libc.check(_setns(fd, _FLAGS[kind]), f"setns({kind})")


def make_new(*kinds: Kind) -> None:
    """Create namespaces of these kinds for the calling thread; for pid and time, for its children. Needs CAP_SYS_ADMIN.

    Raises OSError (EPERM; ENOSPC where the machine's limit on namespaces is reached).
    """
    flags = 0
    for kind in kinds:
        flags |= _FLAGS[kind]
    libc.check(_unshare(flags), f"unshare({', '.join(kinds)})")


def in_namespace(fd: int, kind: Literal["pid", "net"], action: Callable[[], T]) -> T:
    """Call ``action`` in a thread in the namespace ``fd``, and return its result.

    Only that temporary thread changes, and what it starts; with a pid namespace, only what it starts, and ``action``
    must not start threads, which the kernel would refuse. Needs CAP_SYS_ADMIN. Raises OSError, or what ``action``
    raises.
    """

    def visit() -> T:
        enter(fd, kind)
        return action()

    work = Work(visit, "gpucr visit")
    try:
        return work.wait()
    finally:  # after Ctrl-C: let the action finish before anybody cleans up after it
        work.results()


# --- what a new one needs ------------------------------------------------------------------------------------------


def follow_host_mounts() -> None:
    """In a new mount namespace: receive later mounts of the machine, but pass none on (MS_SLAVE)."""
    _mount(None, "/", None, _MS_REC | _MS_SLAVE)


def mount_proc() -> None:
    """Mount a /proc of this pid namespace. For a process inside it, in its own mount namespace."""
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def mount_shared_memory() -> None:
    """Mount an empty /dev/shm for this mount namespace. Default size: half of the machine's memory."""
    _mount("gpucr-shm", "/dev/shm", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")  # noqa: S108 - where the C library puts it


def mount_terminals(*, with_master: bool = False) -> None:
    """Mount a /dev/pts without pseudoterminals for this mount namespace, with the options of the one that is there.

    ``with_master``: /dev/ptmx is its own as well, which matters where /dev is read-only: CRIU gives it an owner.
    """
    there = [mount for mount in proc_text.mounts() if (mount.point, mount.kind) == (_TERMINALS, "devpts")]
    if there:
        kept = [each for each in there[-1].options.split(",") if each.startswith(_OF_TERMINALS)]
        _mount("devpts", _TERMINALS, "devpts", _MS_NOSUID | _MS_NOEXEC, ",".join(["newinstance", *kept]))
        if with_master:
            _mount(f"{_TERMINALS}/ptmx", _MASTER, None, _MS_BIND)


def bring_loopback_up() -> None:
    """Bring up the loopback interface, the only one of a new network namespace: 127.0.0.1 and ::1 work."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket:
        request = _INTERFACE_FLAGS.pack(b"lo", 0)
        name, flags = _INTERFACE_FLAGS.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _INTERFACE_FLAGS.pack(name, flags | _IFF_UP))


def take_any_address() -> None:
    """In a new network namespace: sockets may have addresses of networks that it lacks, and lead to them.

    All of it ends at the loopback interface. Needs a /proc that can be written.
    """
    for protocol in _PROTOCOLS:
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            (PROC / "sys/net" / protocol / "ip_nonlocal_bind").write_text("1")
    loopback = struct.pack("=I", socket.if_nametoindex("lo"))
    with netlink.opened(socket.NETLINK_ROUTE) as connection:
        for family in (socket.AF_INET, socket.AF_INET6):
            route = _ROUTE.pack(family, 0, 0, 0, _TABLE_MAIN, _BY_ADMINISTRATOR, _SCOPE_LINK, _UNICAST, 0)
            body = route + netlink.attribute(_OUT_INTERFACE, loopback)
            connection.send(netlink.message(_NEW_ROUTE, netlink.CREATE | netlink.ACK, body))
            try:
                netlink.require_done(connection)
            except OSError as e:
                if family != socket.AF_INET6:
                    raise OSError(e.errno, f"a route to the loopback interface: {e.strerror}") from e


def set_last_pid(pid: int) -> None:
    """Make the caller's pid namespace assign the first free id above this next. Needs CAP_SYS_ADMIN."""
    _LAST_PID.write_text(str(pid))


def last_pid_clear_of(taken: Sequence[int], room: int = _NEXT) -> int:
    """A value for `set_last_pid` that is followed by ``room`` ids not in ``taken``, within the machine's limit.

    Raises ValueError if there is none.
    """
    end = int(_PID_MAX.read_text())
    above = [0, *sorted(set(taken))]
    below = [*above[1:], end]
    gaps = [(low, high) for low, high in zip(above, below, strict=True) if high - low > room]
    if not gaps:
        raise ValueError(f"no {room} ids in a row are free below {end}")
    low, high = gaps[-1]
    return low + min(room, high - low - room)


def keep_clear_of(wanted: Collection[int]) -> None:
    """If the next processes here would get one of these ids, let them get others, where this is permitted."""
    with contextlib.suppress(OSError, ValueError):
        last, end = int(_LAST_PID.read_text()), int(_PID_MAX.read_text())
        if any((pid - last - 1) % end < _NEXT for pid in wanted):
            set_last_pid(last_pid_clear_of(sorted(wanted), _NEXT))


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    libc.check(_mount_of_libc(words[0], words[1], words[2], flags, words[3]), f"mount({target})")
