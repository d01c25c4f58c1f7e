"""Parts of a process that clone(2) shares: memory, the table of descriptors, the working folder, signal handlers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gpucr.diagnosis.preflight.support import ties as facts
from gpucr.diagnosis.preflight.support.fact import Fact
from gpucr.diagnosis.preflight.ties.look import Seen, Tie
from gpucr.linux import kcmp
from gpucr.linux.kcmp import Part

_ALL: tuple[Part, ...] = ("memory", "file descriptors", "working folder and umask", "signal handlers")
_REFUSED_INSIDE: tuple[Part, ...] = ("memory", "working folder and umask", "signal handlers")
"""What CRIU refuses between processes of a tree. It can share the table of descriptors (cr-dump.c, CRIU 4.2.1)."""


def find(seen: Seen) -> Iterator[Tie]:
    """Shared parts, with processes outside the tree and inside it.

    Asked only where it is possible: of a parent and its children, and of processes whose stacks begin at the same
    address, as in a fork.
    """
    alike: dict[int, list[int]] = {}
    for pid, kin in seen.kin.items():
        if kin.stack_start:
            alike.setdefault(kin.stack_start, []).append(pid)
    for process in seen.tree:
        if process.parent_pid in seen.pids:
            yield from _shared(facts.CLONED_INSIDE, _REFUSED_INSIDE, process.pid, process.parent_pid)
    root = seen.tree[0]
    for other, kin in seen.other_kin.items():
        is_near = root.parent_pid in (other, kin.parent_pid) and kin.stack_start
        for pid in dict.fromkeys([*([root.pid] if is_near else []), *alike.get(kin.stack_start, ())]):
            yield from _shared(facts.CLONED, _ALL, pid, other)


def _shared(fact: Fact, parts: tuple[Part, ...], pid: int, other: int) -> Iterator[Tie]:
    for part in parts:
        with contextlib.suppress(OSError):  # one has ended, or the caller may not look
            if kcmp.shares(pid, other, part):
                yield Tie(fact, pid, other, "kcmp(2)", {"part": part})
