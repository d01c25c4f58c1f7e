"""Files that root may not open, on file systems that keep them from it: NFS with root_squash, FUSE without allow_root.

CRIU opens programs and libraries again in the dump, and every file in the restore.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import processes as facts
from gpucr.linux import proc_text
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import PROC
from gpucr.model import Job

_KINDS = re.compile(r"fuse(\..*|blk)?|nfs\d?|cifs|smb\d?|9p|afs|ceph|lustre|gpfs|beegfs|panfs|glusterfs")


def check_squashed_files(job: Job, look: OneLook | None = None) -> list[Finding]:
    """One finding for each process that has some. None for an ordinary user, whose CRIU has the rights of the job."""
    if os.geteuid():
        return []
    look = look or OneLook()
    names = {process.pid: process.name for process in job.processes}
    found: dict[int, list[str]] = {}
    for tree in job.trees:
        points = _points(tree.root.pid)
        seen: set[str] = set()
        for pid, what, target, link in _links_of(tree, look) if points else ():
            if target.startswith(points) and target not in seen:
                seen.add(target)
                if not _may_open(link):
                    found.setdefault(pid, []).append(f"{what}, {target.rstrip('/')}")
    return [
        facts.NOT_ROOTS.seen(
            files[0] + (f", and {len(files) - 1} more" if len(files) > 1 else ""),
            pid,
            process=f"process {pid} ({names[pid]})",
        )
        for pid, files in found.items()
    ]


def _points(pid: int) -> tuple[str, ...]:
    """Where such file systems are mounted, as beginnings of paths."""
    with contextlib.suppress(OSError):  # it has ended
        mounts = proc_text.mounts(PROC / str(pid) / "mountinfo")
        return tuple(f"{mount.point.rstrip('/')}/" for mount in mounts if _KINDS.fullmatch(mount.kind))
    return ()


def _links_of(tree: Job, look: OneLook) -> Iterator[tuple[int, str, str, str]]:
    """Programs, working folders, open and mapped files: what, its name, and a way to it."""
    for pid in tree.pids:
        folder = f"{PROC}/{pid}"
        with contextlib.suppress(OSError):
            for what in ("exe", "cwd"):
                yield pid, what, f"{look.link(pid, what)}/", f"{folder}/{what}"
            for path in look.mapped(pid).paths:
                yield pid, "mapped", path, f"{folder}/root{path}"
    for target, files in look.files_of(tree.pids).items():
        yield files[0].pid, f"fd {files[0].fd}", target, f"{PROC}/{files[0].pid}/fd/{files[0].fd}"


def _may_open(link: str) -> bool:
    """Whether root may read it. True of what has gone meanwhile."""
    try:
        return not stat.S_ISREG(os.stat(link).st_mode) or os.access(link, os.R_OK)
    except PermissionError:  # FUSE
        return False
    except OSError:
        return True
