"""Whether a restored job's clocks can go on where they stood, for which CRIU uses a time namespace."""

from __future__ import annotations

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.linux import namespaces, processes


def check_clocks(*, are_in_images: bool) -> list[Finding]:
    """Whether the job's CLOCK_MONOTONIC and CLOCK_BOOTTIME go on. ``are_in_images``: CRIU dumped what they showed."""
    if "time" not in namespaces.kinds_here():
        return [_jump("this kernel has no time namespaces (CONFIG_TIME_NS)")]
    if not are_in_images:
        return [_jump("the kernel of the dump had no time namespaces (CONFIG_TIME_NS)")]
    if processes.can_set_clocks():
        return []
    if not processes.can_checkpoint_processes():
        return [_jump("only root can create the time namespace that would continue them")]
    return [
        Finding(
            "blocking",
            "the job's clocks cannot be set",
            "CAP_SYS_TIME is missing",
            "CRIU continues them from their values at the dump, and gives up where it is not permitted to",
            "give the container CAP_SYS_TIME, or restore outside it; the machine's own clock stays as it is",
            code="GPUCR-CLOCKS",
        )
    ]


def _jump(evidence: str) -> Finding:
    return Finding(
        "warning",
        "the job's clocks jump to those of this machine",
        evidence,
        "CLOCK_MONOTONIC and CLOCK_BOOTTIME may even go back: timeouts end at once, or much too late",
        "restore and dump on kernels with CONFIG_TIME_NS (Linux 5.6 and newer)",
        code="GPUCR-CLOCKS",
    )
