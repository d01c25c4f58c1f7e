"""Small private records, one a process, that a later command needs: they are there until the next boot.

A record belongs to one process (pid and start time). It is an aid, not the truth: what cannot be written or read is not
there, and every operation works without.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpucr.linux import processes
from gpucr.model import ProcessId
from gpucr.operations.logs import state_folder

_MAX_BYTES = 1 << 20


class ProcessRecords:
    """The records of one kind, in a folder of that name."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def write(self, process: ProcessId, record: Mapping[str, Any]) -> None:
        """Write the record of a process that has none; one that is there stays."""
        with contextlib.suppress(OSError):  # a full disk must not stop an operation
            path = self.path(process)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as stream:
                json.dump(record, stream)

    def read(self, process: ProcessId) -> Any:
        """The record as JSON, unchecked; None where there is none, or something that is not JSON."""
        with contextlib.suppress(OSError, ValueError, RecursionError), self.path(process).open("rb") as stream:
            return json.loads(stream.read(_MAX_BYTES))
        return None

    def remove(self, process: ProcessId) -> None:
        """Remove the record of one process."""
        with contextlib.suppress(OSError):
            self.path(process).unlink()

    def remove_ended(self) -> None:
        """Remove the records of all processes that have ended."""
        with contextlib.suppress(OSError):
            for path, process in list(self._all()):
                if not processes.is_alive(process):
                    path.unlink()

    def path(self, process: ProcessId) -> Path:
        """Where the record of a process is."""
        return self.folder() / f"{_boot_id()}-{process.pid}-{process.start_time_ticks}.json"

    def folder(self) -> Path:
        """Root's records are in /run, a user's in XDG_RUNTIME_DIR: both are emptied by a reboot, as the processes are.

        Raises OSError where the user has no folder.
        """
        if os.geteuid() == 0:
            return Path("/run/gpucr") / self._kind
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        return (Path(runtime) / "gpucr" if runtime else state_folder()) / self._kind

    def _all(self) -> Iterator[tuple[Path, ProcessId]]:
        boot = _boot_id()
        for path in self.folder().iterdir():
            numbers = path.stem.removeprefix(f"{boot}-").split("-")
            if path.stem.startswith(boot) and len(numbers) == 2 and all(number.isdecimal() for number in numbers):
                yield path, ProcessId(int(numbers[0]), int(numbers[1]))


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # start times begin anew with every boot
