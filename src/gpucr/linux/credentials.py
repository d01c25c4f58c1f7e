"""The credentials of another process (credentials(7), capabilities(7)), and taking them on.

Root that runs something inside a container's namespaces must not lend it more than the container has.
"""

from __future__ import annotations

import ctypes
import os
from typing import Literal

from msgspec import Struct

from gpucr.linux import capabilities, libc, proc_text
from gpucr.linux.capabilities import Capabilities

_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_CAPBSET_DROP = 4, 8, 24  # include/uapi/linux/prctl.h
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 2, 4
_CAPABILITY_VERSION_3 = 0x20080522  # include/uapi/linux/capability.h
_WORD_BITS = 32

_prctl_of_libc = libc.function("prctl", ctypes.c_int, *(ctypes.c_ulong,) * 4)
_capset = libc.function("capset", ctypes.c_void_p, ctypes.c_void_p)


class Credentials(Struct, frozen=True):
    """Who a process is and what it may do. ``uids`` and ``gids``: real, effective and saved."""

    uids: tuple[int, int, int]
    gids: tuple[int, int, int]
    groups: tuple[int, ...]
    capabilities: Capabilities


def of(pid: int | Literal["self"]) -> Credentials:
    """The credentials of a process; ``self``: the caller's, even if it has another pid in /proc.

    Raises FileNotFoundError or ProcessLookupError where it has ended.
    """
    fields = proc_text.status_fields(f"/proc/{pid}/status")
    uids, gids = (tuple(map(int, fields[name].split()[:3])) for name in ("Uid", "Gid"))
    return Credentials(
        (uids[0], uids[1], uids[2]),
        (gids[0], gids[1], gids[2]),
        tuple(sorted(map(int, fields["Groups"].split()))),
        capabilities.in_status(fields),
    )


def take_on(wanted: Credentials) -> None:
    """Give the calling thread these credentials, but no capability that it lacks itself.

    Irreversible. Raises OSError if it is not allowed to (another user's without CAP_SETUID, a smaller bounding set
    without CAP_SETPCAP).
    """
    own = of("self")
    theirs = wanted.capabilities
    for number in _bits(own.capabilities.bounding & ~theirs.bounding):
        _prctl(_PR_CAPBSET_DROP, number)
    if wanted.groups != own.groups:
        os.setgroups(wanted.groups)
    if wanted.gids != own.gids:
        os.setresgid(*wanted.gids)
    if wanted.uids != own.uids:
        _prctl(_PR_SET_KEEPCAPS, 1)
        os.setresuid(*wanted.uids)
    may = own.capabilities.permitted
    permitted, inheritable = theirs.permitted & may, theirs.inheritable & (may | own.capabilities.inheritable)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _set_capabilities(theirs.effective & may, permitted, inheritable)
    for number in _bits(theirs.ambient & permitted & inheritable):
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, number)
    if theirs.no_new_privs:
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def set_ambient(wanted: int) -> None:
    """Make exactly these of the permitted capabilities effective, for the calling thread and programs that it starts.

    The permitted set stays. Raises OSError.
    """
    own = capabilities.own()
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _set_capabilities(wanted, own.permitted, wanted)
    for number in _bits(wanted):
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, number)


def reduce_to(wanted: int) -> None:
    """The calling process, and programs that it starts, keep these capabilities, and never gain others. OSError."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _set_capabilities(wanted, wanted, wanted)
    for number in _bits(wanted):
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, number)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def hide_from_tracers() -> None:
    """Until its next execve(2), only the machine's root can read or write this process through /proc."""
    _prctl(_PR_SET_DUMPABLE, 0)


def _set_capabilities(effective: int, permitted: int, inheritable: int) -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    masks = (effective, permitted, inheritable)
    words = [mask >> shift & 0xFFFFFFFF for shift in (0, _WORD_BITS) for mask in masks]
    libc.check(_capset(header, (ctypes.c_uint32 * 6)(*words)), "capset")


def _prctl(*arguments: int) -> None:
    libc.check(_prctl_of_libc(*arguments, *(0,) * (5 - len(arguments))), "prctl")


def _bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]
