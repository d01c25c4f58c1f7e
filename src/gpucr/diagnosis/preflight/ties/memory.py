"""Memory that others have mapped or open, too: anonymous, memfd, removed files, and files in /dev/shm."""

from __future__ import annotations

from collections.abc import Iterator

from gpucr.diagnosis.preflight.support import ties as facts
from gpucr.diagnosis.preflight.ties.look import Seen, Tie
from gpucr.linux.descriptor_scan import NAMELESS, SHARED_MEMORY

_MEMORY = ("/dev/zero", "/memfd:", "/SYSV", "/anon_hugepage", SHARED_MEMORY)


def find(seen: Seen) -> Iterator[Tie]:
    """Memory of the tree that others use. What nobody can write to may as well be a copy.

    Several trees find their files of /dev/shm again: the snapshot has one of each.
    """
    job = set(seen.job.pids)
    for key, uses in seen.memory.items():
        others = seen.others_memory.get(key, [])
        path = uses[0].path
        if not path.endswith(NAMELESS):
            for other in [use for use in others if use.pid not in job][:1]:
                yield Tie(facts.NAMED_MEMORY, uses[0].pid, other.pid, f"inode {key[1]}", {"file": path})
        elif others and any(use.is_writable for use in (*uses, *others)):
            fact = facts.MEMORY if path.startswith(_MEMORY) else facts.UNNAMED_FILE
            yield Tie(fact, uses[0].pid, others[0].pid, f"{path.removesuffix(NAMELESS)} with inode {key[1]}")
