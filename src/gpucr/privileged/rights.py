"""A thread's rights, from the kernel or from CRIU's images: the same rules for both."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from msgspec import Struct

from gpucr.linux import capabilities, proc_text

_SETS = ("CapInh", "CapPrm", "CapEff", "CapAmb")


class Refused(Exception):
    """The helper refuses; the text says why, for the user."""


class Rights(Struct, frozen=True):
    """``uids`` and ``gids``: real, effective, saved, of files. ``held``: capabilities in any set but
    the bounding one.
    """

    uids: tuple[int, ...]
    gids: tuple[int, ...]
    groups: frozenset[int]
    held: int
    bounding: int
    no_new_privs: bool
    has_filter: bool


def rights_of(pid: int, tid: int) -> Rights:
    """A thread's rights, from /proc. Raises OSError if it has ended, or Refused if the kernel says too little."""
    fields = proc_text.status_fields(f"/proc/{pid}/task/{tid}/status")
    try:
        held = 0
        for name in _SETS:
            held |= int(fields[name], 16)
        return Rights(
            uids=tuple(map(int, fields["Uid"].split())),
            gids=tuple(map(int, fields["Gid"].split())),
            groups=frozenset(map(int, fields["Groups"].split())),
            held=held,
            bounding=int(fields["CapBnd"], 16),
            no_new_privs=fields["NoNewPrivs"] != "0",
            has_filter=fields.get("Seccomp", "0") != "0",
        )
    except (KeyError, ValueError) as e:
        raise Refused(f"this kernel does not tell what process {pid} may do") from e


def require_no_special(rights: Rights, uid: int, groups: Collection[int], bounding: int, name: str) -> None:
    """Raise Refused unless this is an ordinary process of the user. ``bounding``: the largest bounding set."""
    if set(rights.uids) != {uid} or len(rights.uids) != 4:
        raise Refused(f"{name} does not run as uid {uid} alone: {', '.join(map(str, rights.uids))}")
    if len(rights.gids) != 4 or len(set(rights.gids)) != 1 or not set(rights.gids) <= set(groups):
        raise Refused(f"{name} runs with a group that the user has not: {', '.join(map(str, rights.gids))}")
    if not rights.groups <= set(groups):
        raise Refused(f"{name} is in a group that the user is not in: {sorted(rights.groups - set(groups))[0]}")
    if rights.held:
        raise Refused(f"{name} has capabilities: {', '.join(capabilities.names_of(rights.held))}")
    if rights.bounding & ~bounding:
        raise Refused(f"{name} has a larger bounding set than the caller")
    if rights.has_filter and not rights.no_new_privs:
        raise Refused(f"{name} has a system call filter without no_new_privs")


def label_of(pid: int) -> str:
    """A process's LSM label; empty if there is no LSM or no label."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/attr/current").read_bytes().rstrip(b"\0\n").decode(errors="replace")
    return ""
