"""What a suspend leaves for the resume that follows: small private records, one a process, until the next boot.

A resume needs two things that the driver does not tell. In which state the process was found, because what was locked
or checkpointed before the suspend stays so. And how much memory it held on which GPU: a restore that runs out of
device memory loses the process (measured, H200, driver 580: the first attempt gives 2, every later one 304, also when
the memory is free again), so the room is checked first.

A record belongs to one process (pid and start time) and is removed by the resume. It is an aid, not the truth: without
it a process is resumed to RUNNING, and the room is judged by the process's largest mapping.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpucr.model import CudaState, GangMember, ProcessId
from gpucr.operations.logs import state_folder

_MAX_BYTES = 1 << 20
_FOUND_STATES = (CudaState.RUNNING, CudaState.LOCKED, CudaState.CHECKPOINTED)


@dataclass(frozen=True)
class SuspendedRecord:
    """One process: the state in which the suspend found it, and device memory per GPU UUID at that time."""

    found: CudaState
    device_bytes: Mapping[str, int]


def remember(member: GangMember, device_bytes: Mapping[str, int]) -> None:
    """Write the record of one process.

    For a process found CHECKPOINTED, a record that is there already stays: it is from the suspend that counts. Found in
    any other state, another tool has brought the process back since, and what is there says nothing any more.
    """
    record = {"found": int(member.found), "device_bytes": dict(device_bytes)}
    if member.found is not CudaState.CHECKPOINTED:
        forget(member.id)
    with contextlib.suppress(OSError):  # a full disk must not stop a suspend
        path = _path(member.id)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as stream:
            json.dump(record, stream)


def recall(process: ProcessId) -> SuspendedRecord | None:
    """Read the record of one process; None where there is none that can be used."""
    try:
        with _path(process).open("rb") as stream:
            record = json.loads(stream.read(_MAX_BYTES))
        found, held = record["found"], record["device_bytes"]
        if type(found) is not int or found not in _FOUND_STATES:
            return None
        if any(type(size_bytes) is not int or size_bytes < 0 for size_bytes in held.values()):
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return SuspendedRecord(CudaState(found), held)


def forget(process: ProcessId) -> None:
    """Remove the record of one process."""
    with contextlib.suppress(OSError):
        _path(process).unlink()


def _path(process: ProcessId) -> Path:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # start times begin anew with every boot
    return _folder() / f"{boot}-{process.pid}-{process.start_time_ticks}.json"


def _folder() -> Path:
    """Root's records are in /run, a user's in XDG_RUNTIME_DIR: both are emptied by a reboot, as the processes are."""
    if os.geteuid() == 0:
        return Path("/run/gpucr/suspended")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime) / "gpucr" if runtime else state_folder()) / "suspended"
