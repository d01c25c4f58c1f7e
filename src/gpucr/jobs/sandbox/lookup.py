"""Find a process's gpucr sandbox, and its data, from outside."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from gpucr.jobs.sandbox import known_keepers, label
from gpucr.jobs.sandbox.label import Tag
from gpucr.linux import processes
from gpucr.linux.namespaces import PidNamespace, namespace_id, pids_of
from gpucr.model import ProcessId, ProcessInfo


class Sandbox(Struct, frozen=True):
    """A sandbox with a job, or waiting for one. Pids are the caller's.

    ``root`` is the job's first process; None before it exists and after it has ended. ``lineage`` is shared by a job
    and everything restored from its snapshots. ``log_path``: its output file, if known.
    """

    keeper: ProcessId
    root: ProcessId | None
    lineage: str
    network: str
    log_path: str | None

    @property
    def pids(self) -> PidNamespace:
        """Translates pids."""
        return PidNamespace(self.keeper.pid)

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait until its keeper has ended, and so everything inside. False: timed out."""
        try:
            fd = os.pidfd_open(self.keeper.pid)
        except ProcessLookupError:
            return True
        try:
            if not processes.is_alive(self.keeper):  # asked after the pidfd was opened: the two are the same process
                return True
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            return bool(poller.poll(timeout_s * 1000))
        finally:
            os.close(fd)

    @property
    def shared_memory(self) -> Path:
        """Its private /dev/shm, as a path usable outside."""
        return processes.PROC / str(self.keeper.pid) / "root" / "dev" / "shm"


def of(pid: int) -> Sandbox | None:
    """A process's sandbox; None if it is in none of this user's. Needs ptrace access to it."""
    for each in (pid, *_ancestors(pid)):
        found = _tag_of(each)
        if found is not None:
            return _sandbox(each, found) if found.isolated else None
    return None


def is_keeper(process: ProcessInfo) -> bool:
    """Whether it is a job's keeper. Checks its name first, which is cheap."""
    return process.name == label.FILE_NAME and _tag_of(process.pid) is not None


def keeper_root(pid: int) -> ProcessId | None:
    """The first process of this keeper's job; None if it is not a keeper, or has no job."""
    found = _tag_of(pid)
    return None if found is None else _root(pid, found)


def copies(lineage: str, *, also_awaited: bool = False) -> tuple[Sandbox, ...]:
    """All sandboxes in which this lineage's job, or a copy of it, runs now.

    ``also_awaited``: also those waiting for it, which have no ``root`` yet.
    """
    found: list[Sandbox] = []
    for pid in processes.all_pids():
        its_tag = _tag_of(pid)
        if its_tag is not None and its_tag.isolated and its_tag.lineage == lineage:
            sandbox = _sandbox(pid, its_tag)
            if sandbox is not None and (sandbox.root is not None or (also_awaited and its_tag.root == 0)):
                found.append(sandbox)
    return tuple(found)


def _sandbox(keeper_pid: int, its_tag: Tag) -> Sandbox | None:
    stat = processes.read_stat(keeper_pid)
    if stat is None:
        return None
    return Sandbox(
        keeper=ProcessId(keeper_pid, stat.start_time_ticks),
        root=_root(keeper_pid, its_tag),
        lineage=its_tag.lineage,
        network=its_tag.network,
        log_path=its_tag.log_path or None,
    )


def _root(keeper_pid: int, its_tag: Tag) -> ProcessId | None:
    if its_tag.root == 0:
        return None
    pid = PidNamespace(keeper_pid).outer_pid(its_tag.root)
    stat = processes.read_stat(pid) if pid is not None else None
    if pid is None or stat is None or stat.status in "ZX":
        return None
    return ProcessId(pid, stat.start_time_ticks)


def _tag_of(pid: int) -> Tag | None:
    """The process's label, if it is this user's keeper."""
    folder = processes.PROC / str(pid)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        stat = processes.read_stat(pid)
        if stat is None or not known_keepers.is_known(ProcessId(pid, stat.start_time_ticks)) or not _is_trusted(pid):
            return None
        for name in os.listdir(folder / "fd"):
            if os.readlink(folder / "fd" / name) == label.LINK:
                found = label.decode(_start_of(folder / "fd" / name, label.SIZE_BYTES))
                # A child has the same file open until it executes the job's program.
                is_its_own = found is not None and pids_of(pid)[-1:] == (found.keeper,)  # none once it has ended
                return found if is_its_own else None
    return None


def _start_of(path: Path, size_bytes: int) -> bytes:
    # It may be something else by now: the open of a named pipe waits for who writes to it.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(fd, size_bytes)
    except OSError:  # a pipe that has nothing to say
        return b""
    finally:
        os.close(fd)


def _is_trusted(pid: int) -> bool:
    """Whether this user made the process, in this user namespace: nobody else's label is trusted."""
    same_user = os.stat(processes.PROC / str(pid)).st_uid == os.geteuid()
    return same_user and namespace_id(pid, "user") == namespace_id("self", "user")


def _ancestors(pid: int) -> Iterator[int]:
    stat = processes.read_stat(pid)
    while stat is not None and stat.parent_pid > 0:
        yield stat.parent_pid
        stat = processes.read_stat(stat.parent_pid)
