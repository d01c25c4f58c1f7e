"""Records that a suspend leaves for the resume: small, private, one per process, until the next boot.

A resume needs two things that the driver does not report. The state in which the process was found, because one that
was checkpointed before the suspend stays so. And how much memory it held on which GPU: a restore that runs
out of device memory loses the process (measured, H200, driver 580: the first attempt gives 2, every later one 304, even
when the memory is free again), so the room is checked first.

A record belongs to one process (pid and start time) and is removed by the resume. It is an aid, not the truth: without
it a process is resumed to RUNNING, and its size is estimated from its largest mapping.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from gpucr.linux.process_records import ProcessRecords
from gpucr.model import CudaState, GangMember, GpuMap, ProcessId
from gpucr.records import Count, Record, RecordError

RECORDS = ProcessRecords("suspended")
_STATES = (CudaState.RUNNING, CudaState.CHECKPOINTED)


class SuspendedRecord(Record, frozen=True):
    """One process: the state to which a resume leads it, and device memory per GPU UUID when it was suspended.

    ``has_hooks``: its program has registered functions for the resume.
    """

    found: CudaState
    device_bytes: Mapping[str, Count]
    has_hooks: bool = False

    def __post_init__(self) -> None:
        if self.found not in _STATES:
            raise RecordError(f"no process is resumed to {self.found.word}")


def remember(member: GangMember, device_bytes: Mapping[str, int], *, has_hooks: bool = False) -> None:
    """Write the record of one process.

    For a process found CHECKPOINTED, an existing record stays: it is from the suspend that counts. In any other state,
    another tool has brought the process back since, and the record is stale.
    """
    write = RECORDS.write if member.found is CudaState.CHECKPOINTED else RECORDS.replace
    write(member.id, SuspendedRecord(member.lasting_state, dict(device_bytes), has_hooks))


def recall(process: ProcessId) -> SuspendedRecord | None:
    """Read the record of one process; None if there is none that can be used."""
    return RECORDS.read(process, SuspendedRecord)


def moved(process: ProcessId, gpu_map: GpuMap) -> None:
    """The process went to other GPUs, in a resume that may still be undone: update its record."""
    record = recall(process)
    if record is not None:
        held = {gpu_map.new_for(uuid): size_bytes for uuid, size_bytes in record.device_bytes.items()}
        RECORDS.replace(process, replace(record, device_bytes=held))


def restored(process: ProcessId, record: SuspendedRecord) -> None:
    """The process is back from a snapshot, and suspended as it was dumped: write the record that it had."""
    RECORDS.replace(process, record)


def forget(process: ProcessId) -> None:
    """Remove the record of one process."""
    RECORDS.remove(process)
