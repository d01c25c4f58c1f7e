"""Small private records, one per process, for later commands. They last until the next boot.

A record belongs to one process (pid and start time). It is an aid, not the truth: if it cannot be written or read, it
counts as missing, and every operation works without it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TypeVar

from gpucr import records
from gpucr.linux import processes, trusted_paths
from gpucr.linux.private_folders import runtime_folder
from gpucr.model import ProcessId
from gpucr.quantities import whole_number
from gpucr.records import RecordError

_MAX_BYTES = 1 << 20

LARGE_BYTES = 64 << 20
"""As many as a guard can be told (undo/guard_process.py)."""

_SUFFIX = ".json"

T = TypeVar("T")


class ProcessRecords:
    """The records of one kind, in a folder of that name. A larger one than ``max_bytes`` is not valid."""

    def __init__(self, kind: str, *, max_bytes: int = _MAX_BYTES) -> None:
        self._kind = kind
        self._max_bytes = max_bytes

    def write(self, process: ProcessId, record: object) -> None:
        """Write a process's record unless it has one."""
        with contextlib.suppress(OSError):  # a full disk must not stop an operation
            self.require_written(process, record)

    def require_written(self, process: ProcessId, record: object) -> None:
        """Like `write`, for a record that is required. Raises OSError."""
        path = self.path(process)
        trusted_paths.make_private(path.parent)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
        fd = trusted_paths.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(fd, "wb") as stream:
            stream.write(records.encode(record))

    def replace(self, process: ProcessId, record: object) -> None:
        """Write a process's record instead of one that it may have."""
        with contextlib.suppress(OSError):
            path = self.path(process)
            trusted_paths.make_private(path.parent)
            temporary = path.with_suffix(".new")
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            fd = trusted_paths.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with os.fdopen(fd, "wb") as stream:
                stream.write(records.encode(record))
            temporary.rename(path)

    def read(self, process: ProcessId, kind: type[T]) -> T | None:
        """The record; None if there is none, or not a valid one."""
        with contextlib.suppress(OSError, RecordError), self.path(process).open("rb") as stream:
            return records.decode(stream.read(self._max_bytes), kind)
        return None

    def is_written(self, process: ProcessId) -> bool:
        """Whether there is a record of this process."""
        with contextlib.suppress(OSError):
            return self.path(process).exists()
        return False

    def remove(self, process: ProcessId) -> None:
        """Remove the record of one process."""
        with contextlib.suppress(OSError):
            self.path(process).unlink()

    def remove_ended(self) -> None:
        """Remove the records of all processes of this pid namespace that have ended, and what is named after them."""
        with contextlib.suppress(OSError):
            for path, process in list(self._all()):
                if not processes.is_alive(process):
                    path.unlink()

    def ended(self) -> list[ProcessId]:
        """The processes of this pid namespace that have a record, and have ended."""
        found: set[ProcessId] = set()
        with contextlib.suppress(OSError):
            for path, process in self._all():
                if processes.is_alive(process):
                    continue
                if path.suffix == _SUFFIX:
                    found.add(process)
                else:
                    path.unlink()  # its writer was killed in `replace`
        return list(found)

    def path(self, process: ProcessId) -> Path:
        """Where the record of a process is, or would be written to."""
        start = os.path.join(self.folder(), f"{scope()}-{process.pid}-")  # asked for every process of the machine
        paths = [f"{start}{process.start_time_ticks + ticks}{_SUFFIX}" for ticks in (0, -1, 1)]  # `ProcessId.is_same`
        return Path(next(filter(os.path.lexists, paths), paths[0]))

    def folder(self) -> Path:
        """Their folder. Raises OSError if the user has none, or somebody else can change it."""
        return runtime_folder() / self._kind

    def _all(self) -> Iterator[tuple[Path, ProcessId]]:
        here = scope()
        for path in self.folder().iterdir():
            if path.stem.startswith(f"{here}-"):
                pid, start_time_ticks = map(whole_number, path.stem.removeprefix(f"{here}-").partition("-")[::2])
                if pid is not None and start_time_ticks is not None:
                    yield path, ProcessId(pid, start_time_ticks)


def remove_all_ended(*, apart_from: Collection[str]) -> None:
    """`ProcessRecords.remove_ended` for every kind that has records, except these."""
    with contextlib.suppress(OSError):
        for kind in os.listdir(runtime_folder()):
            if kind not in apart_from:
                ProcessRecords(kind).remove_ended()


def scope() -> str:
    """The scope of pids and start times: this boot (start times restart with each) and this pid namespace."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}-{os.stat('/proc/self/ns/pid').st_ino}"
