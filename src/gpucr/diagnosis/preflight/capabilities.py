"""Whether a restore can give the job back the capabilities that it had."""

from __future__ import annotations

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import machine as facts
from gpucr.linux.capabilities import names_of


def check_capabilities(needed: int, available: int) -> list[Finding]:
    """The capabilities of the job's threads against those that CRIU will have, as bit masks.

    Seen with CRIU 4.2.1 and a bounding set without one of the job's capabilities: the restore of a process with one
    thread fails, that of a process with several hangs.
    """
    missing = names_of(needed & ~available)
    if not missing:
        return []
    return [
        facts.CAPABILITIES.seen(
            f"{', '.join(missing)}: in CRIU's images of the job, and not in CapBnd of /proc/self/status",
            capabilities="a capability" if len(missing) == 1 else "capabilities",
        )
    ]
