"""Give another process a copy of one of our file descriptors.

Descriptors travel over local sockets (SCM_RIGHTS, unix(7)), so the process briefly gets a pair of them. It makes its
calls itself, in a stopped thread (injection.py).

If gpucr is killed in here, the sockets stay open in the process, perhaps with the descriptor in transit. Then CRIU
cannot dump the process, and the file's memory is not freed. So the sockets have names, by which the guard and every
later gpucr recognise them (`sockets_left_behind`). Only between the call that makes them and the one that names them do
they look like the job's own; then two empty ones stay open, which is harmless.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator

from gpucr.linux import proc_text
from gpucr.linux.injection import CLOSE, RECVMSG, SOCKETPAIR, run_syscall, scratch_address
from gpucr.linux.pidfds import copied_descriptor
from gpucr.linux.processes import open_files
from gpucr.linux.ptrace import TracedThread

_MSG_CMSG_CLOEXEC = 0x40000000  # include/linux/socket.h
_MESSAGE = struct.Struct("<QI4xQQQQI4x")  # struct msghdr: name, its length, iov, count, control, its length, flags
_VECTOR = struct.Struct("<QQ")
_CONTROL = struct.Struct("<QiiI4x")  # struct cmsghdr and one descriptor
_PAIR = struct.Struct("<ii")

_NAME = "gpucr-descriptor-"
"""Prefix of the sockets' names in the abstract namespace (unix(7))."""
_SHOWN = f"@{_NAME}"  # in /proc


def send_descriptor(thread: TracedThread, fd: int) -> int:
    """Open our file in the thread's process too, close-on-exec, and return its number there. Stopped → stopped.

    Needs what `run_syscall` needs and raises what it raises, and OSError with EMFILE if the process may open no more
    files. Nothing else stays open in the process.
    """
    with _socket_into(thread) as (ours, theirs):
        socket.send_fds(ours, [b"\0"], [fd])
        return _receive(thread, theirs)


def sockets_left_behind(pid: int) -> tuple[int, ...]:
    """The sockets that a killed gpucr left in a process. Nobody may be sending it a descriptor meanwhile.

    Empty if the process has ended; raises PermissionError.
    """
    sockets = {file.fd: file.target for file in open_files(pid) if file.target.startswith("socket:[")}
    if not sockets:
        return ()
    try:
        known = proc_text.unix_socket_names(pid)
    except OSError:
        return ()
    # One with several names may be the program's own, and somebody else's name imitates ours.
    ours = {f"socket:[{inode}]" for inode, names in known.items() if len(names) == 1 and names[0].startswith(_SHOWN)}
    return tuple(number for number, target in sockets.items() if target in ours)


def close_descriptor(thread: TracedThread, number: int) -> None:
    """Close a descriptor of the thread's process. Stopped → stopped. Raises what `run_syscall` does."""
    run_syscall(thread, CLOSE, number)


@contextlib.contextmanager
def _socket_into(thread: TracedThread) -> Iterator[tuple[socket.socket, int]]:
    """Our end of a socket pair, and the number of the other end in the process."""
    scratch = scratch_address(thread)
    run_syscall(thread, SOCKETPAIR, socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, 0, scratch)
    for_us, theirs = _PAIR.unpack(thread.read_memory(scratch, _PAIR.size))
    try:
        try:
            ours = _named_copy(thread, for_us)
            _named_copy(thread, theirs).close()
        finally:
            close_descriptor(thread, for_us)
        with ours:
            yield ours, theirs
    finally:
        close_descriptor(thread, theirs)


def _named_copy(thread: TracedThread, number: int) -> socket.socket:
    """A named socket of the process, also opened here."""
    copy = socket.socket(fileno=copied_descriptor(int(thread.status()["Tgid"]), number))
    try:
        copy.bind(f"\0{_NAME}{os.urandom(8).hex()}")
    except BaseException:
        copy.close()
        raise
    return copy


def _receive(thread: TracedThread, number: int) -> int:
    """Receive the sent descriptor from the socket, inside the process."""
    scratch = scratch_address(thread)
    vector = scratch + _MESSAGE.size
    data = vector + _VECTOR.size
    control = data + 8
    message = _MESSAGE.pack(0, 0, vector, 1, control, _CONTROL.size, 0)
    thread.write_memory(scratch, message + _VECTOR.pack(data, 1) + bytes(8 + _CONTROL.size))
    run_syscall(thread, RECVMSG, number, scratch, _MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
    length, level, kind, received = _CONTROL.unpack(thread.read_memory(control, _CONTROL.size))
    if (length, level, kind) != (socket.CMSG_LEN(4), socket.SOL_SOCKET, socket.SCM_RIGHTS):
        raise OSError(errno.EMFILE, f"thread {thread.tid} was refused one more descriptor")
    return int(received)
