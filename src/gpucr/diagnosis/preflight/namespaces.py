"""Namespaces of a job's processes that CRIU cannot dump, or dumps and never restores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import processes as facts
from gpucr.linux.processes import PROC
from gpucr.model import Job, ProcessInfo

_KINDS = {
    "cgroup": "cgroup", "ipc": "IPC", "mnt": "mount", "net": "network", "pid": "pid", "time": "time", "user": "user",
    "uts": "UTS",
}  # fmt: skip
_MAY_NEST = ("mnt", "net")


def check_namespaces(job: Job, *, is_sandboxed: bool = False) -> list[Finding]:
    """Processes with namespaces that the root of their tree does not have.

    Seen with CRIU 4.2.1: with a mount or network namespace of its own a child is dumped, and no restore succeeds,
    unless the root itself has one that is not CRIU's (pstree.c); with another one the dump fails. In gpucr's sandboxes
    CRIU is in the root's.
    """
    found = []
    ours = _namespaces_of(os.getpid())
    for tree in job.trees:
        roots = _namespaces_of(tree.root.pid)
        nested = [kind for kind in _MAY_NEST if not is_sandboxed and roots.get(kind) != ours.get(kind)]
        for process in tree.processes:
            foreign = [
                name
                for kind, name in _KINDS.items()
                if kind not in nested and any(link != roots.get(kind) for link in _links(process, kind))
            ]
            if foreign:
                found.append(
                    facts.NAMESPACE.seen(
                        f"/proc/{process.pid}/ns",
                        process.pid,
                        process=f"process {process.pid} ({process.name})",
                        namespaces=" and ".join(foreign) + (" namespaces" if len(foreign) > 1 else " namespace"),
                    )
                )
        if roots.get("user") != ours.get("user"):
            found += _unmapped(tree.root)
    return found


def _links(process: ProcessInfo, kind: str) -> Iterator[str]:
    """Its namespace of this kind, and the one that its children get."""
    for name in (kind, f"{kind}_for_children") if kind == "time" else (kind,):
        with suppress(OSError):  # it has ended, or the kernel has none
            yield os.readlink(f"{PROC}/{process.pid}/ns/{name}")


def _namespaces_of(pid: int) -> dict[str, str]:
    found = {}
    for kind in _KINDS:
        with suppress(OSError):
            found[kind] = os.readlink(f"{PROC}/{pid}/ns/{kind}")
    return found


def _unmapped(root: ProcessInfo) -> list[Finding]:
    """A user namespace in which nobody is known: CRIU cannot tell whose the processes are."""
    try:
        is_mapped = bool((PROC / str(root.pid) / "uid_map").read_bytes().strip())
    except OSError:
        return []
    name = f"process {root.pid} ({root.name})"
    return [] if is_mapped else [facts.NO_USERS.seen(f"/proc/{root.pid}/uid_map is empty", root.pid, process=name)]
