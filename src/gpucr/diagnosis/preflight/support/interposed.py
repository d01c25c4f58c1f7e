"""What the interposers of a job's processes count, if all of them answer."""

from __future__ import annotations

from gpucr.diagnosis.preflight.support.fact import Fact
from gpucr.diagnosis.preflight.support.gpu_memory import DRIVER_REFUSES, LOSS, NOT_MANAGED

IPC_OPEN = Fact(
    what="{process} has {count} of other processes open over CUDA IPC",
    consequence=LOSS,
    remedy="send tensors through host memory (`tensor.cpu()`), or end the process that opened them",
    code="GPUCR-CUDA-IPC",
    unless=("legacy_ipc",),
)
PEER_ENABLED = Fact(
    what="{process} has peer access between its GPUs enabled",
    consequence=LOSS,
    remedy="give each GPU a process of its own",
    code="GPUCR-PEER-ACCESS",
    unless=("peer_access",),
)
IMPORTED = Fact(
    what="{process} has {count} of imported device memory mapped, of other processes or its own that came back to it",
    consequence="by the driver alone " + LOSS,
    remedy="leave the way to gpucr (`--gpu-state auto`)",
    code="GPUCR-IMPORTED-MEMORY",
    unless=("vmm_export",),
    case="with `--gpu-state driver`, `captured` or `custom`",
)
CAPTIVE = Fact(
    what="{process} has {count} of imported device memory mapped, which its interposer cannot take: {why}",
    consequence=LOSS,
    remedy="end the part of the program that keeps it there, or wait for the end of the job",
    code="GPUCR-IMPORTED-MEMORY",
    unless=("vmm_export",),
)
SILENT = Fact(
    what="the interposer of {process} does not answer",
    consequence="whether the driver could restore the process is not known",
    remedy="try again in a moment; continue a stopped process; a job keeps the library that it was started with: use "
    "the gpucr that started it",
    code="GPUCR-INTERPOSER",
)
TOO_MANY_BLOCKS = Fact(
    what="the job has {count} of device memory, and gpucr needs a descriptor for each",
    consequence="its memory could not leave its processes",
    remedy="allow {needed} open files (`ulimit -Hn`, LimitNOFILE= of a service), or use `--gpu-state driver`",
    code="GPUCR-OPEN-FILES",
)
UNOWNED = Fact(
    what="{process} has device memory of a process outside of the job mapped",
    consequence="processes that share memory must be stopped, and come back, together",
    remedy="name a process above both, or end one of them",
    code="GPUCR-CUDA-IPC",
)
TORN = Fact(
    what="{process} shares device memory with process {other}, which is not a part of the job",
    consequence=UNOWNED.consequence,
    remedy=UNOWNED.remedy,
    code="GPUCR-CUDA-IPC",
)
SUSPENDED_SHARING = Fact(
    what="{process} is suspended, and has {count} of device memory of other processes",
    consequence="whose they are is known to the suspended processes alone, by pids that others may have after a "
    "restore",
    remedy="resume the job before its dump (`gpucr resume {root}`)",
    code="GPUCR-GPU-STATE",
)
HALF_AWAY = Fact(
    what="{process} is {state}, and {count} of its device memory are away",
    consequence="the gpucr that took them out was killed together with its guard, and a snapshot would lack them",
    remedy="`gpucr resume` of the job brings back what the process keeps; otherwise end it, and restore its last "
    "snapshot",
    code="GPUCR-CUDA-STATE",
)
MULTICAST = Fact(
    what="{process} has {count} (NCCL's NVLS)",
    consequence="no driver checkpoints multicast memory",
    remedy="start the job with NCCL_NVLS_ENABLE=0, as `gpucr run` does",
    code="GPUCR-MEMORY-OUTSIDE",
)
DMA_BUF = Fact(
    what="{process} has device memory registered with a network card or another device (dma-buf)",
    consequence="the device would keep writing to memory that the process no longer owns",
    remedy="end the connections between machines first, or keep NCCL from GPUDirect RDMA with NCCL_NET_GDR_LEVEL=LOC",
    code="GPUCR-MEMORY-OUTSIDE",
)
EXTERNAL = Fact(
    what="{process} has memory of a graphics or video program imported",
    consequence=LOSS,
    remedy="end the part of the program that uses it",
    code="GPUCR-MEMORY-OUTSIDE",
)
MANAGED_COUNTED = Fact(
    what="{process} uses managed memory", consequence=DRIVER_REFUSES, remedy=NOT_MANAGED, severity="warning"
)
