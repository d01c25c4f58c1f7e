"""Device memory that the driver hands over: what cannot be undone of that, said before it begins."""

from __future__ import annotations

from collections.abc import Collection

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.linux import memory
from gpucr.linux.tmpfs import KEPT_NAME
from gpucr.model import CudaState, Job
from gpucr.quantities import counted


def check_kept(job: Job) -> list[Finding]:
    """Suspended processes that keep the bytes of their device memory since the driver has handed it over."""
    return [
        Finding(
            "blocking",
            f"process {member.pid} is suspended by custom storage",
            f"it has {KEPT_NAME} mapped",
            "CRIU cannot dump the file that keeps its device memory",
            f"resume it first (`gpucr resume {job.root.pid}`), or suspend it with `--gpu-state captured`",
            member.pid,
            code="GPUCR-GPU-STATE",
        )
        for member in job.gang
        if member.found is CudaState.CHECKPOINTED and memory.has_mapped(member.pid, f"/{KEPT_NAME}")
    ]


def check_handed_over(pids: Collection[int]) -> list[Finding]:
    """Of processes whose memory goes through the driver's custom storage. None of them: nothing."""
    if not pids:
        return []
    return [
        Finding(
            "warning",
            f"device memory of {counted(len(pids), 'process')} leaves by the driver's custom storage",
            "the driver has it, and gpucr has tried it on a simulated driver only",
            "what the driver has begun cannot be called off: gpucr brings the job back when it fails or is killed, but "
            "where the carrier, the process that the driver handed the memory to, is killed meanwhile they are ended",
            "`--gpu-state captured` goes through the driver's staging, which is slower and has run on hardware",
        )
    ]
