"""OpenCL in processes with CUDA: CRIU cannot dump what it has open, and no driver checkpoints its contexts."""

from __future__ import annotations

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import processes as facts
from gpucr.interposer.client import ask_status
from gpucr.linux.opencl import LIBRARY, has_opencl
from gpucr.model import Job


def check_opencl(job: Job) -> list[Finding]:
    """Whether it is in use: interposers count the contexts that were made.

    Without one it shows when the job stands still, by what the driver's checkpoint leaves.
    """
    found = []
    for member in job.gang:
        if has_opencl(member.pid):
            status = ask_status(member.pid)
            evidence = f"{LIBRARY.strip('/')} in /proc/{member.pid}/maps"
            fact = facts.OPENCL_UNKNOWN if status is None else facts.OPENCL_USED if status.opencl else facts.OPENCL_SEEN
            count = status.opencl if status is not None else 0
            found.append(fact.seen(evidence, member.pid, process=f"process {member.pid}", count=count))
    return found
