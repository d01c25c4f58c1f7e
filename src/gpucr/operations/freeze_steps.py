"""The steps of freeze and thaw: stop a job with its device memory held by gpucr, and let it run again.

Dump, the container hook and `gpucr.freeze` use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpucr.diagnosis import preflight
from gpucr.gpu_state.stop_others import StopOthers, steps_without_cuda
from gpucr.model import Job
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Step

if TYPE_CHECKING:
    from gpucr.gpu_state.cuda_work import CudaWork


def steps_to_freeze(job: Job, cuda: CudaWork | None, protection: Protection) -> tuple[list[Step], list[Step]]:
    """The steps after which a whole job stands still, also without CUDA, and those after which it runs as found."""
    if cuda is not None:
        return cuda.steps_to_freeze(StopOthers(job, lambda: cuda.gang.members, cuda.guarded))
    return steps_without_cuda(job, protection)


def findings_of_spool(
    cuda: CudaWork, needs: Sequence[preflight.MemoryNeed], target: Path | None = None
) -> list[preflight.Finding]:
    """Route memory that does not fit into host memory through a disk, if possible (`custom_storage.spool`).

    ``needs``: with everything in host memory; reduced here. ``target``: where the snapshot goes.
    """
    spool = cuda.custom.spool_if_short(sum(need.size_bytes for need in needs))
    if spool is None:
        return []
    return preflight.check_spool(spool.folder, spool.size_bytes, spool.why_not, target)
