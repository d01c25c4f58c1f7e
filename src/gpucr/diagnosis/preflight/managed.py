"""Managed memory (cudaMallocManaged), which the driver refuses to checkpoint."""

from __future__ import annotations

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.measured import Measurements, all_come_back, say
from gpucr.diagnosis.preflight.support import gpu_memory as facts
from gpucr.diagnosis.preflight.traits import CudaTraits, JobTraits

_WITHOUT = 1


def check_managed(job: JobTraits, measured: Measurements) -> list[Finding]:
    """Processes with more mappings of ``/dev/nvidia-uvm`` than without managed memory.

    Measured on driver 580: one mapping of 2 MiB in every process, and another one for managed memory. Unknown, so not
    reported, for processes on several GPUs. Only a warning, since nothing is lost: the driver refuses.
    """
    if all_come_back(measured, facts.MANAGED.unless):
        return []
    return [
        _finding(each, measured) for each in job.processes if each.uvm_mappings > _WITHOUT and _on_one_gpu(job, each)
    ]


def _on_one_gpu(job: JobTraits, process: CudaTraits) -> bool:
    return len(job.machine) == 1 or (process.gpus is not None and len(process.gpus) == 1)


def _finding(process: CudaTraits, measured: Measurements) -> Finding:
    return facts.MANAGED.seen(
        f"it has /dev/nvidia-uvm mapped {process.uvm_mappings} times, without managed memory it would be once; "
        + say(measured, facts.MANAGED.unless),
        process.pid,
        process=f"process {process.pid} ({process.process.name})",
    )
