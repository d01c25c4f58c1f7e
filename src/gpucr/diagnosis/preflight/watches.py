"""Watches of files (inotify, fanotify) that CRIU cannot find again.

The kernel shows what is watched by a number of the file system (a handle), without a name. CRIU opens that, and where
the file system cannot (overlayfs, as a rule) it looks for the file below a few folders (``check_open_handle`` in
fsnotify.c, irmap.c; 4.2.1).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import processes as facts
from gpucr.diagnosis.preflight.support.fact import Fact
from gpucr.linux import proc_text, watches
from gpucr.linux.one_look import OneLook
from gpucr.linux.processes import PROC
from gpucr.linux.watches import Watched
from gpucr.model import Job

_SEARCHED = (
    "/etc", "/var/spool", "/var/log", "/usr/share/dbus-1/services", "/usr/share/dbus-1/system-services",
    "/var/lib/polkit-1/localauthority", "/usr/share/polkit-1/actions", "/lib/udev",
)  # fmt: skip
_WITHOUT_LASTING_INODES = ("tmpfs", "devtmpfs")


def check_watches(job: Job, look: OneLook | None = None) -> list[Finding]:
    """Those of each process that CRIU would not find, or leave out."""
    look = look or OneLook()
    names = {process.pid: f"process {process.pid} ({process.name})" for process in job.processes}
    found: dict[tuple[str, int], Finding] = {}
    for tree in job.trees:
        for pid, fact, evidence in _refused(tree, look):
            found.setdefault((fact.what, pid), fact.seen(evidence, pid, process=names[pid]))
    return list(found.values())


def _refused(tree: Job, look: OneLook) -> Iterator[tuple[int, Fact, str]]:
    lost: dict[tuple[int, int], tuple[int, Fact, str]] = {}
    for target, files in look.files_of(tree.pids).items():
        for file in files if target.startswith("anon_inode:") else ():
            for watched in watches.watched_by(file) if watches.is_watcher(file) else ():
                where = f"/proc/{file.pid}/fd/{file.fd}"
                if watched is None:
                    yield file.pid, facts.WATCH_OF_FILE_SYSTEM, where
                elif (fact := _judge(watched, tree.root.pid)) is not None:
                    evidence = f"{where} watches inode {watched.inode} of {_name_of(watched.device, tree.root.pid)}"
                    lost[watched.device, watched.inode] = (file.pid, fact, evidence)
    if lost:
        for key in _found_below(f"{PROC}/{tree.root.pid}/root", set(lost)):
            del lost[key]
    yield from lost.values()


def _judge(watched: Watched, pid: int) -> Fact | None:
    root = f"{PROC}/{pid}/root"
    fact = facts.WATCH
    for mount in _mounts_of(watched.device, pid):
        try:
            fd = watches.opened(watched, f"{root}{mount.point}")
        except PermissionError:
            fact = facts.WATCH_BY_USER
        except OSError:  # a file, a mount below another one, or one that cannot open by number
            continue
        else:
            try:
                return None if mount.kind not in _WITHOUT_LASTING_INODES or _has_name(fd, root) else facts.WATCH
            finally:
                os.close(fd)
    return fact


def _mounts_of(device: int, pid: int) -> list[proc_text.Mount]:
    try:
        return [each for each in proc_text.mounts(f"{PROC}/{pid}/mountinfo") if each.device == device]
    except OSError:  # it has ended
        return []


def _name_of(device: int, pid: int) -> str:
    mounts = _mounts_of(device, pid)
    return f"{mounts[0].point} ({mounts[0].kind})" if mounts else "a file system that it has not mounted"


def _has_name(fd: int, root: str) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(root + os.readlink(f"{PROC}/self/fd/{fd}")).st_ino == os.fstat(fd).st_ino
    return False


def _found_below(root: str, wanted: set[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Those that CRIU finds by looking through folders, links among them."""
    for folder in ("/.", *_SEARCHED):
        if not wanted:
            return
        for status in _below(root + folder, is_deep=folder != "/."):
            if (status.st_dev, status.st_ino) in wanted:
                wanted.remove((status.st_dev, status.st_ino))
                yield status.st_dev, status.st_ino


def _below(path: str, *, is_deep: bool = True) -> Iterator[os.stat_result]:
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        yield status
        for name in os.listdir(path) if is_deep and stat.S_ISDIR(status.st_mode) else ():
            yield from _below(f"{path}/{name}")
