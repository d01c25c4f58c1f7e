"""Device memory opened from another process (CUDA IPC): it is lost at the restore.

Measured on two H200, driver 580: a process with an open memory handle is lost, and the handle leaves no trace outside.
Interprocess events come back and do leave one: a file of the process that made them, mapped by those that opened them.
torch makes such an event with every tensor that it shares, so the file is evidence. Without it, two processes on one
GPU are refused too.
"""

from __future__ import annotations

import re

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.measured import Measurements, all_come_back, say
from gpucr.diagnosis.preflight.sharing import SHARED_FILES, name_processes
from gpucr.diagnosis.preflight.support import gpu_memory as facts
from gpucr.diagnosis.preflight.traits import CudaTraits, JobTraits

_EVENT_FILE = re.compile(r"/dev/shm/cuda\.shm\.[0-9a-f]+\.([0-9a-f]{1,8})\.[0-9a-f]+(?: \(deleted\))?")  # noqa: S108
"""A user id, the process's own pid, and a number, all in hex."""
_DEVICE_FILES = "/dev/nvidia"
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def check_cuda_ipc(job: JobTraits, measured: Measurements) -> list[Finding]:
    """Processes that have, or may have, opened another one's device memory."""
    canaries = _canaries(job)
    if all_come_back(measured, canaries):
        return []
    known = say(measured, canaries)
    return _opened(job, known) or _on_one_gpu(job, known)


def _canaries(job: JobTraits) -> tuple[str, ...]:
    """The canaries for memory that these processes may share. torch's expandable segments are VMM memory."""
    settings = [each.setting(name) or "" for each in job.processes for name in _ALLOCATOR_SETTINGS]
    expandable = any("expandable_segments:true" in setting.lower().replace(" ", "") for setting in settings)
    return (*facts.SAME_GPU.unless, "vmm_export") if expandable else facts.SAME_GPU.unless


def _opened(job: JobTraits, known: str) -> list[Finding]:
    found: list[Finding] = []
    for each in job.processes:
        others = [path for path in sorted(each.mapped) if _maker(path) not in (None, each.own_pid)]
        if others:
            found.append(
                facts.IPC_EVENTS.seen(
                    f"it has {others[0]} mapped, made by process {_maker(others[0])}; the mapping stays when "
                    f"everything is closed; {known}",
                    each.pid,
                    process=f"process {each.pid} ({each.process.name})",
                )
            )
    return found


def _maker(path: str) -> int | None:
    """The pid of the process that made an event's file; None for any other path."""
    match = _EVENT_FILE.fullmatch(path)
    return int(match[1], 16) if match else None


def _on_one_gpu(job: JobTraits, known: str) -> list[Finding]:
    """Processes with device memory on the same GPU, unless all of them use NCCL over shared host memory."""
    found: dict[tuple[int, ...], tuple[list[CudaTraits], list[str]]] = {}
    for where, holders in _holders(job):
        if len(holders) > 1 and not all(holder.mapped_with(SHARED_FILES) for holder in holders):
            pids = tuple(holder.pid for holder in holders)
            found.setdefault(pids, (holders, []))[1].append(where)
    return [
        facts.SAME_GPU.seen(
            f"{', '.join(places)}; shared memory itself cannot be seen from outside; {known}",
            pids[0],
            processes=name_processes([holder.pid for holder in holders]),
        )
        for pids, (holders, places) in found.items()
    ]


def _holders(job: JobTraits) -> list[tuple[str, list[CudaTraits]]]:
    """The evidence that processes may hold memory on the same GPU, and which ones.

    Processes outside the job count too if it is part of their tree: `--only`, or a child that was named.
    """
    uuids = sorted(frozenset().union(*(each.gpus or () for each in job.processes)))
    if uuids:  # processes unknown to NVML then hold none: they are suspended, or only watch
        everybody = (*job.processes, *job.relatives)
        return [
            (f"NVML: they hold memory on {uuid}", [each for each in everybody if uuid in (each.gpus or ())])
            for uuid in uuids
        ]
    # NVML sees no processes in most containers; cuInit maps device files.
    unknown = [each for each in job.processes if each.mapped_with(_DEVICE_FILES) is not None]
    return [(f"NVML does not tell on which GPUs; {_DEVICE_FILES}* is mapped", unknown)]
