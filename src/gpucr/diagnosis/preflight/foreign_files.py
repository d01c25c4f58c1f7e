"""Files from mounts that the job's mount namespace does not have: CRIU finds no path to them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import processes as facts
from gpucr.diagnosis.preflight.support.fact import Fact
from gpucr.diagnosis.preflight.undumpable import is_message_queue
from gpucr.linux import mounts, proc_text
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import PROC
from gpucr.model import Job

_MEMFD = "/memfd:"
_MEMORY = (_MEMFD, "/dev/zero (deleted)", "/dev/pts/")  # on mounts of the kernel's; terminals are found by number
_DRIVERS = re.compile("/nvidia[^/]*$")  # wherever its device files are


def check_foreign_files(job: Job, look: OneLook | None = None) -> list[Finding]:
    """Programs, working folders and open files on mounts that are in none of its namespace's tables (mountinfo).

    Each descriptor is looked at, since the same path can be on different mounts: ``/dev/null`` of a container, and that
    of who started it. A path that several processes have is reported once. Files of the GPU driver are no obstacle:
    gpucr opens some when it gives memory back, and the driver's checkpoint takes them away.
    """
    look = look or OneLook()
    seen: dict[tuple[str, int], tuple[Fact, list[str]]] = {}
    for tree in job.trees:
        with contextlib.suppress(OSError):  # it has ended
            table = _table_of(tree.root.pid, look)
            if table is None:
                continue
            known = _mounts_in(table)
            reported: set[str] = set()
            for pid, what, target, link in _links_of(tree, look):
                if target not in reported and _is_on_none(link, target, known, table):
                    reported.add(target)
                    fact = facts.PROGRAM_IN_MEMORY if target.startswith(_MEMFD) else facts.FOREIGN_FILE
                    seen.setdefault((fact.what, pid), (fact, []))[1].append(f"{what}, {target}")
    names = {process.pid: process.name for process in job.processes}
    return [
        fact.seen(
            found[0] + (f", and {len(found) - 1} more" if len(found) > 1 else ""),
            pid,
            process=f"process {pid} ({names[pid]})",
        )
        for (_, pid), (fact, found) in seen.items()
    ]


def _table_of(pid: int, look: OneLook) -> str | None:
    """All mounts of the process's namespace; None where nobody shows them. One in a chroot shows only those below."""
    if look.namespace(pid, "mnt") == look.namespace("self", "mnt"):
        return f"{PROC}/self/mountinfo"
    return f"{PROC}/{pid}/mountinfo" if look.link(pid, "root") == "/" else None


def _mounts_in(table: str) -> set[int]:
    return {mount.number for mount in proc_text.mounts(table)}


def _is_on_none(link: str, target: str, known: Collection[int], table: str) -> bool:
    """Whether what this leads to is on none of these mounts, also at a second look at all of it.

    A running job closes files and opens others with their numbers, and mounts come meanwhile.
    """
    with contextlib.suppress(OSError):
        if mounts.mount_of(link) in known:
            return False
        mount = mounts.mount_of(link)
        return os.readlink(link) == target and mounts.mount_of(link) == mount and mount not in _mounts_in(table)
    return False


def _links_of(tree: Job, look: OneLook) -> Iterator[tuple[int, str, str, str]]:
    """Of each process: its pid, what it has, where that was seen to lead to, and the link in /proc."""
    # Those with others have a finding of their own.
    with_these_mounts = [pid for pid in tree.pids if look.is_in_namespace_of(pid, tree.root.pid, "mnt")]
    for pid in with_these_mounts:
        for what in ("exe", "cwd", "root"):
            with contextlib.suppress(OSError):
                yield pid, what, look.link(pid, what), f"{PROC}/{pid}/{what}"
    for target, files in look.files_of(with_these_mounts).items():
        is_elsewhere = target.startswith(_MEMORY) or _DRIVERS.search(target) or is_message_queue(files[0])
        if target.startswith("/") and not is_elsewhere:
            for file in files:
                yield file.pid, f"fd {file.fd}", target, f"{PROC}/{file.pid}/fd/{file.fd}"
