"""What /proc shows of processes in one stage of an operation: each fact is read once, when it is first asked for.

What was seen while a job ran says nothing about it once it stands still. So each stage makes a look of its own, and the
checks of the stage share it: with hundreds of processes, reading takes most of the time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal

from msgspec import Struct

from gpucr.linux import proc_text, processes
from gpucr.linux.descriptor_scan import NAMELESS, SHARED_MEMORY, is_memory
from gpucr.linux.processes import PROC, OpenFile

_PATH = re.compile(rb"^\S+ \S+ \S+ \S+ \d+ +(\S.*)$", re.MULTILINE)
"""In a line of ``maps``: those of anonymous memory have none."""

Pid = int | Literal["self"]


class Mapped(Struct, frozen=True):
    """What a process has mapped. ``passing``: the lines of ``/proc/PID/maps`` about what may end with its users."""

    paths: frozenset[str]
    passing: tuple[str, ...]


class OneLook:
    """Processes at one moment."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[OpenFile, ...]] = {}
        self._links: dict[tuple[Pid, str], str] = {}
        self._status: dict[int, bytes] = {}
        self._mapped: dict[int, Mapped] = {}
        self._opened: dict[OpenFile, os.stat_result | None] = {}

    def files(self, pid: int) -> tuple[OpenFile, ...]:
        found = self._files.get(pid)
        if found is None:
            found = self._files[pid] = processes.open_files(pid)
        return found

    def files_of(self, pids: Iterable[int]) -> dict[str, list[OpenFile]]:
        """Descriptors by what they lead to. Processes that the caller may not look into seem to have none."""
        found: dict[str, list[OpenFile]] = {}
        for pid in pids:
            with suppress(OSError):
                for file in self.files(pid):
                    found.setdefault(file.target, []).append(file)
        return found

    def opened(self, file: OpenFile) -> os.stat_result | None:
        """What it leads to; None if it has been closed, or its file system is gone. Raises PermissionError."""
        if file not in self._opened:
            try:
                self._opened[file] = os.stat(f"{PROC}/{file.pid}/fd/{file.fd}")
            except PermissionError:
                raise
            except OSError:
                self._opened[file] = None
        return self._opened[file]

    def link(self, pid: Pid, name: str) -> str:
        """Where a link in ``/proc/PID`` leads. Raises OSError."""
        found = self._links.get((pid, name))
        if found is None:
            found = self._links[pid, name] = os.readlink(f"{PROC}/{pid}/{name}")
        return found

    def namespace(self, pid: Pid, kind: str) -> str:
        """The process's namespace of this kind. Raises OSError."""
        return self.link(pid, f"ns/{kind}")

    def namespaces(self, pid: Pid, names: Iterable[str]) -> dict[str, str]:
        """Those of these namespaces that the kernel has, by name in ``/proc/PID/ns``; none if the process has ended."""
        found: dict[str, str] = {}
        for name in names:
            try:
                found[name] = self.namespace(pid, name)
            except OSError:
                continue
        return found

    def is_in_namespace_of(self, pid: int, other_pid: Pid, kind: str) -> bool:
        """Whether both are in one namespace. False if one has ended, or the caller may not look."""
        with suppress(OSError):
            return self.namespace(pid, kind) == self.namespace(other_pid, kind)
        return False

    def sees_our_files(self, pid: int) -> bool:
        """Whether paths mean the same to it as to this process: it has the same mounts and root. Raises OSError."""
        return all(self.link(pid, name) == self.link("self", name) for name in ("ns/mnt", "root"))

    def status_field(self, pid: int, name: str) -> str | None:
        """A field of ``/proc/PID/status``; None if the process has ended, or has no such. Raises PermissionError."""
        found = self._status.get(pid)
        if found is None:
            try:
                found = self._status[pid] = proc_text.read(f"{PROC}/{pid}/status")
            except (FileNotFoundError, ProcessLookupError):
                return None
        return proc_text.in_status_field(found, name)

    def anonymous_bytes(self, pid: int) -> int:
        """Private memory without a file, swapped or not (0 if it has ended): what CRIU writes."""
        fields = (self.status_field(pid, name) for name in ("RssAnon", "VmSwap"))
        return sum(int(field.split()[0]) << 10 for field in fields if field)

    def has_mapped(self, pid: int, name: str) -> bool:
        """Whether a file whose path contains ``name`` is mapped. False if the process has ended."""
        try:
            return any(name in path for path in self.mapped(pid).paths)
        except (FileNotFoundError, ProcessLookupError):
            return False

    def mapped(self, pid: int) -> Mapped:
        """What it has mapped. Raises OSError."""
        found = self._mapped.get(pid)
        if found is None:
            found = self._mapped[pid] = _mapped_in(proc_text.read(f"{PROC}/{pid}/maps"))
        return found


def _mapped_in(maps: bytes) -> Mapped:
    passing: tuple[str, ...] = ()
    if NAMELESS.encode() in maps or SHARED_MEMORY.encode() in maps:
        lines = proc_text.in_lines(maps, errors="surrogateescape")
        passing = tuple(line for line in lines if is_memory((line.split(maxsplit=5)[5:] or [""])[0]))
    return Mapped(frozenset(map(os.fsdecode, set(_PATH.findall(maps)))), passing)
