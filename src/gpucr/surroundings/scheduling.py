"""CPU affinity and I/O priority of a job's threads, and what core dumps have: read at the dump, set at the restore.

CRIU restores scheduling policies and nice values, but none of these: its tasks inherit them from CRIU, and so from the
shell that runs the restore. A shell confined to one CPU would confine the job to it for good.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from gpucr.linux import processes, scheduling
from gpucr.linux.processes import PROC
from gpucr.linux.scheduling import UsableCpus
from gpucr.model import ProcessInfo
from gpucr.snapshot.manifest import Manifest, ProcessRecord, ThreadRecord

_CORE_FILTER = "coredump_filter"


def with_scheduling(records: Iterable[ProcessRecord]) -> tuple[ProcessRecord, ...]:
    """How the threads of frozen processes are scheduled, and what core dumps have; None if the kernel does not say.

    A thread that may use all CPUs that it could get is recorded as free, not as bound to those of this machine.
    """
    usable: UsableCpus | None = None
    with contextlib.suppress(OSError, ValueError):
        usable = UsableCpus()
    return tuple(
        replace(each, scheduling=_scheduling_of(each, usable), core_filter=_core_filter_of(each.pid))
        for each in records
    )


def _scheduling_of(process: ProcessRecord, usable: UsableCpus | None) -> tuple[ThreadRecord, ...] | None:
    if usable is None:
        return None
    try:
        cpus = usable.of(process.pid)
        return tuple(_record(process, tid, cpus) for tid in process.threads)
    except (OSError, ValueError):
        return None


def _core_filter_of(pid: int) -> int | None:
    """The memory that core dumps have (``/proc/PID/coredump_filter``); None if the kernel does not say."""
    try:
        return int((PROC / str(pid) / _CORE_FILTER).read_text(), 16)
    except (OSError, ValueError):  # it has ended; a kernel without core dumps
        return None


def _record(process: ProcessRecord, tid: int, usable: frozenset[int]) -> ThreadRecord:
    cpus = os.sched_getaffinity(tid)
    return ThreadRecord(
        thread=_innermost_id(process.ns_pids, process.pid, tid),
        cpus=None if cpus >= usable else scheduling.cpu_list(cpus),
        io_priority=scheduling.io_priority(tid),
    )


def restore_scheduling(manifest: Manifest, tree: Iterable[ProcessInfo]) -> list[str]:
    """Apply the manifest's values to every thread of a restored tree that does not run yet. Returns warnings.

    Needs CAP_SYS_NICE for processes of other users. A value that cannot be set never fails a restore.
    """
    restored = {process.ns_pids[-1]: process for process in tree}
    warnings: list[str] = []
    for record in manifest.processes:
        process = restored.get(record.ns_pids[-1])
        if record.scheduling is not None and process is not None:
            warnings += _restore_process(record, record.scheduling, process)
        if record.core_filter is not None and process is not None:
            with suppress(OSError):  # it has ended; another user's
                (PROC / str(process.pid) / _CORE_FILTER).write_text(hex(record.core_filter))
    return warnings


def _restore_process(record: ProcessRecord, threads: Iterable[ThreadRecord], process: ProcessInfo) -> list[str]:
    """One warning for all threads of a process with the same problem."""
    met: defaultdict[str, int] = defaultdict(int)
    try:
        tids = {_innermost_id(process.ns_pids, process.pid, tid): tid for tid in processes.threads(process.pid)}
    except OSError:
        return []  # it has ended
    for thread in threads:
        if (tid := tids.get(thread.thread)) is not None:
            for problem in (_set_cpus(tid, thread.cpus), _set_io_priority(tid, thread.io_priority)):
                if problem is not None:
                    met[problem] += 1
    return [
        f"{count} thread{'s' if count > 1 else ''} of process {process.pid} ({record.name}): {problem}"
        for problem, count in met.items()
    ]


def _innermost_id(ns_pids: Sequence[int], pid: int, tid: int) -> int:
    """The thread's id in its process's own pid namespace; most are in ours, and need not be asked for it."""
    return tid if len(ns_pids) == 1 else processes.innermost_thread_id(pid, tid)


def _set_cpus(tid: int, cpus: str | None) -> str | None:
    try:
        if cpus is None:
            scheduling.allow_all_cpus(tid)
            return None
        wanted = scheduling.cpus_in(cpus)
        try:
            os.sched_setaffinity(tid, wanted)  # the kernel skips those that it does not have
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            scheduling.allow_all_cpus(tid)
            return f"bound to CPU {cpus}, none of them available here; it may use every CPU now"
        missing = wanted - os.sched_getaffinity(tid)
        return f"bound to CPU {cpus}; CPU {scheduling.cpu_list(missing)} cannot be used here" if missing else None
    except OSError as e:
        return _failure("CPU affinity", e)


def _set_io_priority(tid: int, value: int) -> str | None:
    try:
        if scheduling.io_priority(tid) != value:
            scheduling.set_io_priority(tid, value)
    except OSError as e:
        return _failure("I/O priority", e)
    return None


def _failure(what: str, error: OSError) -> str | None:
    return None if error.errno == errno.ESRCH else f"its {what} could not be set: {error.strerror}"
