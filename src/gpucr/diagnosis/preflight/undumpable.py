"""Kinds of descriptors and memory that CRIU cannot dump: everything but what it knows.

The lists are those of CRIU 4.2.1 (``dump_one_file`` in files.c, sockets.c, tty.c); each was tried.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import processes as facts
from gpucr.diagnosis.preflight.support.fact import Fact
from gpucr.linux import memory, proc_text, processes
from gpucr.linux.inherited import NVIDIA_DEVICE
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import PROC, OpenFile
from gpucr.model import ProcessInfo

_ANONYMOUS = re.compile(r"anon_inode:(\[(eventfd|eventpoll|fanotify|signalfd|timerfd|pidfd)\]|inotify)")
_IO_URING = "anon_inode:[io_uring]"
_SOCKETS = frozenset(
    ("UNIX", "UNIX-STREAM", "TCP", "TCPv6", "UDP", "UDPv6", "UDP-Lite", "UDPLITEv6", "RAW", "RAWv6", "PING", "PINGv6",
     "NETLINK", "PACKET")
)  # fmt: skip
_PROTOCOL = "system.sockprotoname"
_MEMORY_DEVICES, _MISCELLANEOUS, _TERMINALS, _OTHER_TERMINALS = 1, 10, 4, 5  # Linux's Documentation/admin-guide/devices
_VIRTUAL_TERMINALS = range(1, 64)
_SERIAL = (188, 204)
_PSEUDOTERMINALS = range(128, 144)
_AUTOFS, _FUSE = 235, 229
_THREAD = os.O_EXCL  # PIDFD_THREAD
_NOT_DEVICES = ("/dev/zero", "/dev/shm/", "/dev/hugepages/")  # noqa: S108
_SYSTEM_V = "/SYSV"
_MQUEUE_MAGIC = 0x19800202  # ipc/mqueue.c


Judged = dict[str, tuple[Fact, str] | None]
"""What was found out about files that the processes of a job have in common, by what leads to them."""


def check_kinds(
    process: ProcessInfo,
    files: Sequence[OpenFile],
    judged: Judged,
    *,
    in_gang: bool,
    look: OneLook | None = None,
) -> list[Finding]:
    """Descriptors and mappings of one process that CRIU refuses.

    ``in_gang``: it uses CUDA, and the driver closes what it has opened at the checkpoint: its devices, and files of the
    kernel without a name.
    """
    seen: dict[str, tuple[Fact, list[str]]] = {}
    looked = (
        *_files(process, files, judged, in_gang),
        *_mappings(process, look or OneLook()),
        *_unread(process, files),
    )
    for fact, evidence in looked:
        seen.setdefault(fact.what, (fact, []))[1].append(evidence)
    return [
        fact.seen(
            found[0] + (f", and {len(found) - 1} more" if len(found) > 1 else ""),
            process.pid,
            process=f"process {process.pid} ({process.name})",
        )
        for fact, found in seen.values()
    ]


def serves_fuse(process: ProcessInfo) -> str | None:
    """The descriptor by which it serves a FUSE file system."""
    judged: Judged = {}
    with contextlib.suppress(OSError):  # it has ended
        for fact, evidence in _files(process, processes.open_files(process.pid), judged, in_gang=False):
            if fact is facts.FUSE:
                return evidence
    return None


def _files(
    process: ProcessInfo, files: Iterable[OpenFile], judged: Judged, in_gang: bool
) -> Iterator[tuple[Fact, str]]:
    for file in files:
        found: tuple[Fact, str] | None = None
        if file.target == _IO_URING:
            found = facts.IO_URING, ""
        elif file.target.startswith("anon_inode:"):
            found = None if in_gang or _is_known(file) else (facts.UNDUMPABLE, "")
        elif NVIDIA_DEVICE.match(file.target):
            found = None if in_gang else (facts.GPU_HELD, "")
        elif file.target.startswith("pipe:["):
            found = (facts.UNDUMPABLE, ", a pipe in packet mode") if _is_packet_pipe(file) else None
        elif file.target.startswith(("socket:[", "/")):
            if file.target not in judged:
                judged[file.target] = _judge(file)
            found = judged[file.target]
        if found is not None:
            fact, more = found
            yield fact, f"/proc/{process.pid}/fd/{file.fd} is {file.target}{more}"


def _judge(file: OpenFile) -> tuple[Fact, str] | None:
    if file.target.startswith("socket:["):
        protocol = _protocol_of(file)
        return None if protocol is None or protocol in _SOCKETS else (facts.UNDUMPABLE, f", of {protocol}")
    try:
        status = os.stat(_link(file))
    except OSError:  # closed meanwhile; O_PATH of a link
        return None
    if stat.S_ISCHR(status.st_mode):
        return _device(status.st_rdev)
    if stat.S_ISBLK(status.st_mode):
        return facts.UNDUMPABLE, ", a disk"
    return (facts.UNDUMPABLE, ", a POSIX message queue") if is_message_queue(file) else None


def _is_known(file: OpenFile) -> bool:
    """Whether CRIU knows this kind of the kernel's files."""
    if _ANONYMOUS.fullmatch(file.target) is None:
        return False
    return not (file.target.endswith("[pidfd]") and _flags(file) & _THREAD)


def _protocol_of(file: OpenFile) -> str | None:
    try:
        return os.getxattr(_link(file), _PROTOCOL).rstrip(b"\0").decode(errors="replace")
    except OSError:
        return None


def _is_packet_pipe(file: OpenFile) -> bool:
    with contextlib.suppress(OSError):
        if os.lstat(_link(file)).st_mode & stat.S_IWUSR:
            return bool(_flags(file) & os.O_DIRECT)
    return False


def _device(number: int) -> tuple[Fact, str] | None:
    major, minor = os.major(number), os.minor(number)
    if major == _MISCELLANEOUS and minor == _FUSE:
        return facts.FUSE, ""
    is_known = (
        major == _MEMORY_DEVICES
        or (major, minor) == (_MISCELLANEOUS, _AUTOFS)
        or (major == _TERMINALS and minor in _VIRTUAL_TERMINALS)
        or (major == _OTHER_TERMINALS and minor <= 2)
        or major in _SERIAL
        or major in _PSEUDOTERMINALS
    )
    return None if is_known else (facts.UNDUMPABLE, ", a device")


def is_message_queue(file: OpenFile) -> bool:
    """Whether it is a queue of mq_open(3), which shows as ``/NAME``, or was opened below /dev/mqueue."""
    if os.path.dirname(file.target) not in ("/", "/dev/mqueue"):
        return False
    with contextlib.suppress(OSError):
        return memory.file_system_of(_link(file)) == _MQUEUE_MAGIC
    return False


def _mappings(process: ProcessInfo, look: OneLook) -> Iterator[tuple[Fact, str]]:
    try:
        paths = look.mapped(process.pid).paths
    except (FileNotFoundError, ProcessLookupError):
        return
    for path in sorted(path for path in paths if path.startswith((_SYSTEM_V, "/dev/"))):
        is_deleted = path.endswith("(deleted)")
        if path.startswith(_SYSTEM_V) and is_deleted and look.is_in_namespace_of(process.pid, "self", "ipc"):
            yield facts.SYSTEM_V, f"{path} in /proc/{process.pid}/maps"
        elif path.startswith("/dev/") and not path.startswith(_NOT_DEVICES) and not NVIDIA_DEVICE.match(path):
            yield facts.UNDUMPABLE, f"{path} in /proc/{process.pid}/maps"


def _unread(process: ProcessInfo, files: Iterable[OpenFile]) -> Iterator[tuple[Fact, str]]:
    """Netlink sockets with messages in their queue (columns Rmem and Inode of /proc/PID/net/netlink)."""
    inodes = {file.target[8:-1]: file.fd for file in files if file.target.startswith("socket:[")}
    if inodes:
        with contextlib.suppress(OSError):
            for line in proc_text.lines(f"{PROC}/{process.pid}/net/netlink")[1:]:
                columns = line.split()
                if len(columns) > 9 and columns[9] in inodes and columns[4] != "0":
                    yield facts.UNREAD, f"fd {inodes[columns[9]]}, {columns[4]} bytes"


def _flags(file: OpenFile) -> int:
    with contextlib.suppress(OSError):
        for line in proc_text.lines(f"{PROC}/{file.pid}/fdinfo/{file.fd}"):
            if line.startswith("flags:"):
                return int(line.split()[1], 8)
    return 0


def _link(file: OpenFile) -> str:
    return f"{PROC}/{file.pid}/fd/{file.fd}"
