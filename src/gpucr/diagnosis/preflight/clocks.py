"""Whether a restored job's clocks can continue where they stopped, for which CRIU uses a time namespace."""

from __future__ import annotations

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import machine as facts
from gpucr.linux import capabilities, namespaces


def check_clocks(*, are_in_images: bool) -> list[Finding]:
    """Whether the job's CLOCK_MONOTONIC and CLOCK_BOOTTIME continue. ``are_in_images``: CRIU dumped their values."""
    if "time" not in namespaces.kinds_here():
        return [facts.CLOCKS_JUMP.seen("this kernel has no time namespaces (CONFIG_TIME_NS)")]
    if not are_in_images:
        return [facts.CLOCKS_JUMP.seen("the kernel of the dump had no time namespaces (CONFIG_TIME_NS)")]
    if capabilities.can_set_clocks():
        return []
    if not capabilities.can_checkpoint_processes():
        return [facts.CLOCKS_JUMP.seen("only root can create the time namespace that would continue them")]
    return [facts.CLOCKS.seen("CAP_SYS_TIME is missing")]
