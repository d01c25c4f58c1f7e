"""What a killed gpucr whose guard was killed too has left of its work on a job's sockets. The next gpucr ends it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from gpucr.errors import reason_of
from gpucr.linux import processes, tcp_repair
from gpucr.linux.process_records import scope
from gpucr.model import ProcessId
from gpucr.network import kept, records
from gpucr.network.filters import find_namespace, remove_by_name
from gpucr.network.records import OperationRecord
from gpucr.undo.logs import append_to_log

_UNDO_LIMIT_S = 5.0
"""How long to wait for a CRIU that still holds the job: it undoes by itself."""

_LOOK_EVERY_S = 0.02


def end_all() -> tuple[str, ...]:
    """Bring back the jobs of dead operations, and give up connections whose snapshot is gone. Raises nothing.

    Returns a line for each: what was done, or why it could not be. What an operation or its guard still holds stays.
    """
    said = []
    for name in records.names("operations"):
        with contextlib.suppress(OSError):  # it lives, or is another user's
            held = records.hold(name)
            try:
                said += _end(name)
            finally:
                os.close(held)
    for record in kept.all_kept():
        with contextlib.suppress(OSError):
            if kept.is_gone(record):
                records.remove("kept", record.name)
            elif kept.is_without_snapshot(record):
                kept.give_up(record)
                said.append(f"the snapshot {record.snapshot} is gone: its connections were closed")
    for line in said:
        append_to_log("network", line)
    return tuple(said)


def _end(name: str) -> list[str]:
    record = records.read("operations", name, OperationRecord)
    if record is None:  # its operation has just ended; or the record is damaged, and good for nothing
        records.remove("operations", name)
        return []
    if record.scope != scope():  # another pid namespace has its processes
        return []
    alive = [each for each in record.processes if processes.keeps_running(each)]
    try:
        if not _wait_until_free(alive):
            return [f"{name}: the processes {_names(alive)} are still traced"]
        for each in record.filters:
            if (there := find_namespace(each.namespace)) is not None:
                with there:
                    remove_by_name(name, each.method, there)
        if record.kept is not None and alive:
            kept.forget(record.kept, {each.method for each in record.filters})
        tcp_repair.end(alive, record.reusing)
        processes.continue_stopped(each for each in record.stopped if each in alive)
    except OSError as e:
        return [f"{name}: the job with the processes {_names(alive)} could not be brought back: {reason_of(e)}"]
    records.remove("operations", name)
    return [f"{name}: gpucr and its guard were killed; the processes {_names(alive)} run as they were found"]


def _wait_until_free(alive: Sequence[ProcessId]) -> bool:
    """Whether no process is traced any more."""
    end = time.monotonic() + _UNDO_LIMIT_S
    while any(processes.tracer_pid(each.pid) for each in alive if processes.keeps_running(each)):
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


def _names(found: Sequence[ProcessId]) -> str:
    return ", ".join(str(each.pid) for each in found) or "(none)"
