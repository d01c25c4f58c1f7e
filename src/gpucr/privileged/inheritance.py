"""What a restored job would inherit from the helper's process, and how that process becomes an ordinary user's."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
from collections.abc import Iterator, Sequence
from typing import Literal, NoReturn

from gpucr.linux import capabilities, cgroups, credentials, libc, own_python
from gpucr.privileged import session
from gpucr.privileged.peer import Peer
from gpucr.privileged.rights import Refused

_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36  # include/uapi/linux/prctl.h
_KEYCTL = {"x86_64": 250, "aarch64": 219}  # the number of keyctl(2)
_JOIN_SESSION_KEYRING = 1  # include/uapi/linux/keyctl.h
_FIRST_FREE_FD = 10
# CAP_NET_RAW: CRIU sends a half-closed connection the FIN of its other end.
_ALWAYS = ("CHECKPOINT_RESTORE", "NET_ADMIN", "NET_RAW", "SETPCAP", "SYS_PTRACE", "SYS_RESOURCE")
_WITH_FILTERS = (*_ALWAYS, "SYS_ADMIN")  # also before Linux 5.9, which has no CAP_CHECKPOINT_RESTORE
_prctl = libc.function("prctl", ctypes.c_int, *(ctypes.c_ulong,) * 4)
KEEPER_MODULE = "gpucr.jobs.sandbox.keeper"


def join_cgroups_of(pid: int) -> None:
    """Charge the helper and everything it starts to the peer: memory, processes. Raises Refused."""
    try:
        cgroups.join(pid)
    except OSError as e:
        raise Refused(f"the helper cannot join the caller's cgroups: {e.strerror} ({e.filename})") from e


def needed(*, has_filter: bool) -> int:
    """The helper's capabilities that CRIU gets, as a bit mask."""
    own = capabilities.own()
    names = _ALWAYS if own.permitted & capabilities.mask("CHECKPOINT_RESTORE") and not has_filter else _WITH_FILTERS
    return capabilities.mask(*names) & own.permitted


@contextlib.contextmanager
def as_peer_with(peer: Peer, wanted: int) -> Iterator[None]:
    """For a block, this process and its children are the peer's, with only the capabilities ``wanted``.

    So CRIU opens and creates files with the peer's rights and is charged to the peer, who cannot trace it, lacking
    these capabilities. The saved user id stays root's: this process, but nothing that it starts, returns to it.
    """
    libc.check(_prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # CRIU opens folders through /proc/PID/fd, as the peer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.setgroups(sorted(peer.supplementary))
    os.setresgid(peer.gid, peer.gid, 0)
    os.setresuid(peer.uid, peer.uid, 0)
    libc.check(_prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # changing the user has cleared it
    credentials.set_ambient(wanted)
    try:
        yield
    finally:
        credentials.set_ambient(0)
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups([])


def leave_keyring() -> None:
    """Join a new, empty session keyring. Raises Refused; a kernel without keyrings has none to leak."""
    syscall = libc.function("syscall", ctypes.c_long, ctypes.c_long, ctypes.c_char_p, result=ctypes.c_long)
    if syscall(_KEYCTL[os.uname().machine], _JOIN_SESSION_KEYRING, None) < 0:
        error = libc.last_error("keyctl")
        if error.errno != errno.ENOSYS:
            raise Refused(f"the kernel gives the helper no new keyring: {error}")


def adopt_descendants() -> None:
    """Adopt the processes that CRIU creates below this one, once CRIU ends."""
    libc.check(_prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def become_keeper(peer: Peer, fds: Sequence[int], how: Literal["with-children", "in-sandbox"]) -> NoReturn:
    """Become the peer's for good, and the keeper of this process's children or of the sandbox it is in.

    ``fds``: the descriptors that a keeper starts with.
    """
    given = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE_FD) for fd in fds]
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    session.hold_self_within(peer.session)
    credentials.take_on(peer.credentials(no_new_privs=how == "in-sandbox"))
    for fd in given:
        os.set_inheritable(fd, True)
    command = own_python.command(KEEPER_MODULE, *given, how)
    os.execve(command[0], command, {"PATH": os.defpath})  # noqa: S606 - an argument list, no shell
