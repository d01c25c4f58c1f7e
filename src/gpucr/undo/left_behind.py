"""What a killed operation leaves is on record until it is undone, so that the next command can undo it.

Its guard does. If both are killed, no process can say what it was. So those of a guard's actions that need no
descriptors are also in a record of the guard's (`linux.process_records`), until it is dismissed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from gpucr.linux import locks, processes, trusted_paths
from gpucr.linux.process_records import LARGE_BYTES, ProcessRecords, remove_all_ended
from gpucr.model import ProcessId
from gpucr.records import Record, Text
from gpucr.undo import logs, recovery
from gpucr.undo.recovery import Entry

_KIND = "unfinished"
RECORDS = ProcessRecords(_KIND, max_bytes=LARGE_BYTES)


class Unfinished(Record, frozen=True):
    """What the guard of ``operation`` would do: ``actions`` is an encoded `recovery.Record`."""

    operation: ProcessId
    actions: Text


def note(guard: ProcessId, operation: ProcessId, entries: Sequence[Entry]) -> None:
    """Record this; none: `forget`."""
    if not entries:
        forget(guard)
        return
    without_descriptors = tuple(Entry(each.kind, each.data, ()) for each in entries)
    actions = recovery.encode(recovery.Record(entries=without_descriptors)).decode()
    RECORDS.replace(guard, Unfinished(operation, actions))


def forget(guard: ProcessId) -> None:
    """All of it is done, or none of it is needed."""
    RECORDS.remove(guard)


def forget_own() -> None:
    """`forget` for the guard that calls it."""
    forget(processes.this_process())


def remove_left_behind() -> None:
    """Remove what this user's killed operations have left in this pid namespace. Raises nothing.

    What an operation, or a guard, still works on is left to it, and so is what a CRIU still writes.
    """
    for guard in RECORDS.ended():
        with contextlib.suppress(OSError), _locked(guard):
            unfinished = RECORDS.read(guard, Unfinished)
            if unfinished is None or (
                not processes.is_alive(unfinished.operation)
                and recovery.recover_left(unfinished.actions.encode(), unfinished.operation.pid)
            ):
                forget(guard)
    logs.remove_left_behind()
    remove_all_ended(apart_from=[_KIND])


@contextlib.contextmanager
def _locked(guard: ProcessId) -> Iterator[None]:
    """Only one command does it. Raises BlockingIOError if another one is at it."""
    fd = trusted_paths.open_file(RECORDS.path(guard), os.O_RDONLY)
    try:
        locks.lock(fd)
        yield
    finally:
        os.close(fd)
