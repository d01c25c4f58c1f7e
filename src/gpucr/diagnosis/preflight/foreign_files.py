"""Files from mounts that the job's mount namespace does not have: CRIU finds no path to them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import processes as facts
from gpucr.diagnosis.preflight.support.fact import Fact
from gpucr.diagnosis.preflight.undumpable import is_message_queue
from gpucr.linux import descriptor_scan, namespaces, proc_text
from gpucr.linux.processes import PROC
from gpucr.model import Job

_MEMFD = "/memfd:"
_MEMORY = (_MEMFD, "/dev/zero (deleted)", "/dev/pts/")  # on mounts of the kernel's; terminals are found by number
_DRIVERS = re.compile("/nvidia[^/]*$")  # wherever its device files are


def check_foreign_files(job: Job) -> list[Finding]:
    """Programs, working folders and open files on mounts that are in none of its namespace's tables (mountinfo).

    Each descriptor is looked at, since the same path can be on different mounts: ``/dev/null`` of a container, and that
    of who started it. A path that several processes have is reported once. Files of the GPU driver are no obstacle:
    gpucr opens some when it gives memory back, and the driver's checkpoint takes them away.
    """
    seen: dict[tuple[str, int], tuple[Fact, list[str]]] = {}
    for tree in job.trees:
        with contextlib.suppress(OSError):  # it has ended
            table = _table_of(tree.root.pid)
            if table is None:
                continue
            known = {mount.number for mount in proc_text.mounts(table)}
            reported: set[str] = set()
            for pid, what, target, mount in _mounts_of(tree):
                if mount not in known and target not in reported:
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


def _table_of(pid: int) -> str | None:
    """All mounts of the process's namespace; None where nobody shows them. One in a chroot shows only those below."""
    if namespaces.namespace_id(pid, "mnt") == namespaces.namespace_id("self", "mnt"):
        return f"{PROC}/self/mountinfo"
    return f"{PROC}/{pid}/mountinfo" if os.readlink(f"{PROC}/{pid}/root") == "/" else None


def _mounts_of(tree: Job) -> Iterator[tuple[int, str, str, int]]:
    # Those with others have a finding of their own.
    with_these_mounts = [pid for pid in tree.pids if namespaces.is_same(pid, tree.root.pid, "mnt")]
    for pid in with_these_mounts:
        folder = f"{PROC}/{pid}"
        for what in ("exe", "cwd", "root"):
            with contextlib.suppress(OSError):
                yield pid, what, os.readlink(f"{folder}/{what}"), _mount_of_path(f"{folder}/{what}")
    for target, files in descriptor_scan.descriptors_of(with_these_mounts).items():
        is_elsewhere = target.startswith(_MEMORY) or _DRIVERS.search(target) or is_message_queue(files[0])
        if target.startswith("/") and not is_elsewhere:
            for file in files:
                with contextlib.suppress(OSError):
                    lines = proc_text.lines(f"{PROC}/{file.pid}/fdinfo/{file.fd}")
                    yield file.pid, f"fd {file.fd}", target, _mount_in(lines)


def _mount_of_path(link: str) -> int:
    fd = os.open(link, os.O_PATH | os.O_CLOEXEC)
    try:
        return _mount_in(proc_text.lines(f"{PROC}/self/fdinfo/{fd}"))
    finally:
        os.close(fd)


def _mount_in(fdinfo: list[str]) -> int:
    """Raises OSError if a kernel does not tell (before 3.15)."""
    for line in fdinfo:
        if line.startswith("mnt_id:"):
            return int(line.split()[1])
    raise OSError("there is no mnt_id in fdinfo")
