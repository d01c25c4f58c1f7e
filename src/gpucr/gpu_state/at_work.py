"""Records of where a job belongs while an operation has its device memory: then NVML does not show it on any GPU.

An operation on the jobs of some GPUs then waits for others' work only if it may concern these GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from gpucr.gpu_state import suspended
from gpucr.linux import processes
from gpucr.linux.process_records import ProcessRecords
from gpucr.model import Job, ProcessId
from gpucr.records import Record, Text

RECORDS = ProcessRecords("at-work")


class WorkRecord(Record, frozen=True):
    """``gpus``: UUIDs of all GPUs on which the job is, or was before its suspend. ``by``: whose record it is."""

    by: ProcessId
    gpus: tuple[Text, ...]


class AtWork:
    """The records of one operation, under the job's roots and its processes with CUDA, from `begin` to `end`.

    There are none unless it is known where each of these is, or if (``moves``) the operation takes it elsewhere.
    ``held``: device memory, by pid and GPU UUID.
    """

    def __init__(self, job: Job, held: Mapping[int, Mapping[str, int]], *, moves: bool) -> None:
        roots = (process.id for process in job.processes if process.pid in job.root_pids)
        self._ids = tuple(dict.fromkeys((*roots, *(member.id for member in job.gang))))
        each = [held.get(member.pid) or _before_suspend(member.id) for member in job.gang]
        self._gpus = () if moves or not all(each) else tuple(sorted({uuid for gpus in each for uuid in gpus}))
        self._written: list[ProcessId] = []

    @property
    def processes(self) -> tuple[ProcessId, ...]:
        """The processes that have a record while this work lasts."""
        return self._ids

    def begin(self) -> None:
        RECORDS.remove_ended()
        me = processes.read_stat(os.getpid())
        if me is None or not self._gpus:
            return
        for process in self._ids:
            RECORDS.remove(process)  # one that a killed gpucr has left
            self._written.append(process)
            RECORDS.write(process, WorkRecord(ProcessId(os.getpid(), me.start_time_ticks), self._gpus))

    def end(self) -> None:
        """Remove them: the work is over, or a process has joined that may be on any GPU."""
        while self._written:
            RECORDS.remove(self._written.pop())


def forget_dead(process: ProcessId) -> None:
    """Remove the record of this process if its writer has died."""
    record = RECORDS.read(process, WorkRecord)
    if record is not None and not processes.is_alive(record.by):
        RECORDS.remove(process)


def may_be_on(root: ProcessId, uuids: Collection[str]) -> bool:
    """Whether the job of this first process, which another gpucr works on, may belong on one of these GPUs.

    Ask after having seen the other's claim: a record holds as long as its writer has the job.
    """
    record = RECORDS.read(root, WorkRecord)
    return record is None or not processes.is_alive(record.by) or any(uuid in uuids for uuid in record.gpus)


def _before_suspend(process: ProcessId) -> Collection[str]:
    record = suspended.recall(process)
    return record.device_bytes if record is not None else ()
