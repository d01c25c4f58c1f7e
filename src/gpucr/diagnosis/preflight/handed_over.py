"""Device memory that the driver hands over: what cannot be undone of that, said before it begins."""

from __future__ import annotations

from collections.abc import Collection

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.quantities import counted


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
