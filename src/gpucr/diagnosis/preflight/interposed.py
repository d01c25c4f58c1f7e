"""What the interposers of a job's processes tell: who shares device memory, and what cannot come back.

They see every call, so no rule has to infer it. They count what is alive now: memory that was opened and closed is no
obstacle.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.measured import Measurements, all_come_back, say
from gpucr.diagnosis.preflight.sharing import LOSS, local_world_size
from gpucr.diagnosis.preflight.traits import CudaTraits, JobTraits
from gpucr.interposer.client import ask_status
from gpucr.interposer.protocol import Status
from gpucr.linux import memory
from gpucr.linux.tmpfs import KEPT_NAME
from gpucr.model import CudaState, GangMember, Job
from gpucr.quantities import counted

_TOLD_BY = "counted by its interposer"
_VMM = ("vmm_export",)


def knows_all(job: JobTraits) -> bool:
    """Whether every process has told. Of ranks that torchrun has started outside the job nothing is known."""
    ranks = max(map(local_world_size, job.processes), default=0)
    return all(each.counted is not None for each in job.processes) and ranks <= len(job.processes)


def check_interposed(job: JobTraits, measured: Measurements, *, may_share: bool = False) -> list[Finding]:
    """Of a job whose interposers have all told: what is alive in it that does not come back.

    ``may_share``: they bring back what its processes have of each other.
    """
    found = _torn(job) if may_share else _imported(job, measured)
    for each in job.processes:
        if each.counted is not None:
            found += _shared(each, each.counted, measured)
            found += _outside(each, each.counted)
    return found


def kept_bytes(job: Job) -> int:
    """How much device memory suspended processes of it keep in files, by interposers or custom storage.

    It is not resident: they have not touched it.
    """
    handed_over = (
        memory.mapped_bytes(each.pid, f"/{KEPT_NAME}") for each in job.gang if each.found is CudaState.CHECKPOINTED
    )
    return sum(status.block_bytes for _, status in _suspended(job)) + sum(handed_over)


def check_suspended(job: Job) -> list[Finding]:
    """Processes that were suspended through their interposers, and that have device memory of each other."""
    return [
        Finding(
            "blocking",
            f"process {member.pid} is suspended, and has {counted(status.imported, 'block')} of device memory of "
            "other processes",
            _TOLD_BY,
            "whose they are is known to the suspended processes alone, by pids that others may have after a restore",
            f"resume the job before its dump (`gpucr resume {job.root.pid}`)",
            member.pid,
            code="GPUCR-GPU-STATE",
        )
        for member, status in _suspended(job)
        if status.imported
    ]


def _suspended(job: Job) -> list[tuple[GangMember, Status]]:
    asked = [(each, ask_status(each.pid)) for each in job.gang if each.found is CudaState.CHECKPOINTED]
    return [(member, status) for member, status in asked if status is not None and status.away]


def _shared(process: CudaTraits, counts: Status, measured: Measurements) -> list[Finding]:
    """What it shares with other processes or GPUs, which a canary may have shown to come back."""
    name = f"process {process.pid} ({process.process.name})"
    kinds: Sequence[tuple[int, str, str, str, str]] = (
        (counts.ipc_memory, "legacy_ipc", "GPUCR-CUDA-IPC",
         f"{name} has {counted(counts.ipc_memory, 'allocation')} of other processes open over CUDA IPC",
         "send tensors through host memory (`tensor.cpu()`), or end the process that opened them"),
        (counts.peer_access, "peer_access", "GPUCR-PEER-ACCESS",
         f"{name} has peer access between its GPUs enabled",
         "give each GPU a process of its own"),
    )  # fmt: skip
    return [
        Finding("blocking", what, f"{_TOLD_BY}; {say(measured, (canary,))}", LOSS, remedy, process.pid, code=code)
        for count, canary, code, what, remedy in kinds
        if count > 0 and not all_come_back(measured, (canary,))
    ]


def _imported(job: JobTraits, measured: Measurements) -> list[Finding]:
    """What processes have of each other, where the driver would have to bring it back."""
    if all_come_back(measured, _VMM):
        return []
    return [
        Finding(
            "blocking",
            f"{_name(each)} has {counted(each.counted.imported, 'block')} of device memory of other processes mapped",
            f"{_TOLD_BY}; {say(measured, _VMM)}",
            f"by the driver alone {LOSS}",
            "leave the way to gpucr (`--gpu-state auto`), or send tensors through host memory",
            each.pid,
            code="GPUCR-CUDA-IPC",
        )
        for each in job.processes
        if each.counted is not None and each.counted.imported
    ]


def _torn(job: JobTraits) -> list[Finding]:
    """Memory with one end in the job and one outside: it would be one no more when the job comes back."""
    if job.sharing is None:
        return []  # it is found out when all stand still, before anything is changed
    members = {each.pid: each for each in job.processes}
    found: dict[int, str] = {
        place.pid: "has device memory of a process outside of the job mapped"
        for place in job.sharing.unowned
        if place.pid in members
    }
    for place, owner in job.sharing.owned.items():
        if (place.pid in members) != (owner.pid in members):
            inside, outside = (place.pid, owner.pid) if place.pid in members else (owner.pid, place.pid)
            found[inside] = f"shares device memory with process {outside}, which is not a part of the job"
    return [
        Finding(
            "blocking",
            f"{_name(members[pid])} {what}",
            _TOLD_BY,
            "what shares memory has to stand still, and come back, together",
            "name a process above both, or end one of them",
            pid,
            code="GPUCR-CUDA-IPC",
        )
        for pid, what in found.items()
    ]


def _name(process: CudaTraits) -> str:
    return f"process {process.pid} ({process.process.name})"


def _outside(process: CudaTraits, counts: Status) -> list[Finding]:
    """What hardware or other programs refer to, and what no canary speaks for."""
    name = f"process {process.pid} ({process.process.name})"
    kinds: Sequence[tuple[int, str, str, str]] = (
        (counts.multicast, f"{name} has {counted(counts.multicast, 'multicast object')} (NCCL's NVLS)",
         "no driver checkpoints multicast memory", "start the job with NCCL_NVLS_ENABLE=0, as `gpucr run` does"),
        (counts.dma_buf, f"{name} has device memory registered with a network card or another device (dma-buf)",
         "the device would keep writing to memory that the process no longer has",
         "end the connections between machines first, or keep NCCL from GPUDirect RDMA with NCCL_NET_GDR_LEVEL=LOC"),
        (counts.external, f"{name} has memory of a graphics or video program imported",
         LOSS, "end the part of the program that uses it"),
    )  # fmt: skip
    return [
        Finding("blocking", what, _TOLD_BY, consequence, remedy, process.pid, code="GPUCR-MEMORY-OUTSIDE")
        for count, what, consequence, remedy in kinds
        if count > 0
    ] + _managed(process, counts)


def _managed(process: CudaTraits, counts: Status) -> list[Finding]:
    if not counts.managed:
        return []
    return [
        Finding(
            "warning",
            f"process {process.pid} ({process.process.name}) uses managed memory",
            f"{counted(counts.managed, 'allocation')}, {_TOLD_BY}",
            "the driver refuses to checkpoint managed memory (CUDA_ERROR_NOT_SUPPORTED), and the job keeps running",
            "use cudaMalloc or cudaHostAlloc instead of cudaMallocManaged",
            process.pid,
        )
    ]
