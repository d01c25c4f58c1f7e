"""The steps of freeze and thaw: a job stands still, its device memory in gpucr's hands, and runs again.

Dump, the container hook and `gpucr.freeze` are made of them.
"""

from __future__ import annotations

from gpucr.gang.threads import GangThreads
from gpucr.gpu_state.cuda_work import CudaWork
from gpucr.gpu_state.recovery import GangProtection
from gpucr.gpu_state.steps import ReleaseThreads
from gpucr.gpu_state.stop_others import StopOthers
from gpucr.model import Job
from gpucr.undo.protection import Protection
from gpucr.undo.steps import Step


def steps_to_freeze(job: Job, cuda: CudaWork | None, protection: Protection) -> tuple[list[Step], list[Step]]:
    """The steps after which a whole job stands still, also without CUDA, and those after which it runs as found."""
    if cuda is not None:
        return cuda.steps_to_freeze(StopOthers(job, lambda: cuda.gang.members, cuda.guarded))
    others = StopOthers(job, tuple, GangProtection(protection))
    return [others], [ReleaseThreads(GangThreads(), protection, others.stopped)]
