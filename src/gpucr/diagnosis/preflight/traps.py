"""Traps: jobs whose checkpoint may succeed but not the restore, and what no driver can checkpoint."""

from __future__ import annotations

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.interposed import check_half_away, check_imported, check_interposed, knows_all
from gpucr.diagnosis.preflight.ipc import check_cuda_ipc
from gpucr.diagnosis.preflight.managed import check_managed
from gpucr.diagnosis.preflight.measured import Measurements, check_basics
from gpucr.diagnosis.preflight.modes import check_mig, check_mps, check_profilers
from gpucr.diagnosis.preflight.sharing import check_imex, check_nccl, check_peer_access, check_shared_gpus
from gpucr.diagnosis.preflight.traits import JobTraits


def check_traps(job: JobTraits, measured: Measurements, *, may_share: bool = False) -> list[Finding]:
    """Check everything visible from outside that decides whether a CUDA job comes back.

    ``may_share``: its interposers restore memory that its processes share.
    """
    if not job.processes:
        return []
    return [
        *check_basics(measured),
        *check_half_away(job),
        *(check_interposed(job, measured, may_share=may_share) if knows_all(job) else _inferred(job, measured)),
        *check_imported(job, measured, may_share=may_share),
        *check_shared_gpus(job),
        *check_imex(job),
        *check_mig(job),
        *check_mps(job),
        *check_profilers(job),
    ]


def _inferred(job: JobTraits, measured: Measurements) -> list[Finding]:
    """Sharing, inferred because not every process has an interposer that answers."""
    return [
        *check_nccl(job, measured),
        *check_peer_access(job, measured),
        *check_cuda_ipc(job, measured),
        *check_managed(job, measured),
    ]
