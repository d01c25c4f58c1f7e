"""Namespaces of a job's processes that CRIU cannot dump, or dumps and never restores."""

from __future__ import annotations

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import processes as facts
from gpucr.linux import mount_root
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import PROC
from gpucr.model import Job, ProcessInfo

_KINDS = {
    "cgroup": "cgroup", "ipc": "IPC", "mnt": "mount", "net": "network", "pid": "pid", "time": "time", "user": "user",
    "uts": "UTS",
}  # fmt: skip
_FOR_CHILDREN = "_for_children"  # the one that its children get
_NAMES = tuple(name for kind in _KINDS for name in ((kind, kind + _FOR_CHILDREN) if kind == "time" else (kind,)))
_MAY_NEST = ("mnt", "net")


def check_root() -> list[Finding]:
    """gpucr's own root folder, for a job that is in no sandbox: CRIU finds the mounts of its processes from there."""
    return [] if mount_root.is_mounted() else [facts.ROOT_NOT_MOUNTED.seen("/proc/self/mountinfo has no /")]


def check_namespaces(job: Job, *, is_sandboxed: bool = False, look: OneLook | None = None) -> list[Finding]:
    """Processes with namespaces that the root of their tree does not have.

    Seen with CRIU 4.2.1: with a mount or network namespace of its own a child is dumped, and no restore succeeds,
    unless the root itself has one that is not CRIU's (pstree.c); with another one the dump fails. In gpucr's sandboxes
    CRIU is in the root's.
    """
    look = look or OneLook()
    found = []
    ours = look.namespaces("self", _NAMES)
    for tree in job.trees:
        roots = look.namespaces(tree.root.pid, _NAMES)
        nested = [kind for kind in _MAY_NEST if not is_sandboxed and roots.get(kind) != ours.get(kind)]
        expected = {name: roots.get(name.removesuffix(_FOR_CHILDREN)) for name in _NAMES}
        for process in tree.processes:
            theirs = look.namespaces(process.pid, _NAMES)
            kinds = [name.removesuffix(_FOR_CHILDREN) for name in theirs if theirs[name] != expected.get(name)]
            foreign = [_KINDS[kind] for kind in dict.fromkeys(kinds) if kind not in nested]
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


def _unmapped(root: ProcessInfo) -> list[Finding]:
    """A user namespace in which nobody is known: CRIU cannot tell whose the processes are."""
    try:
        is_mapped = bool((PROC / str(root.pid) / "uid_map").read_bytes().strip())
    except OSError:
        return []
    name = f"process {root.pid} ({root.name})"
    return [] if is_mapped else [facts.NO_USERS.seen(f"/proc/{root.pid}/uid_map is empty", root.pid, process=name)]
