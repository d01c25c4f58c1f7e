"""The environment variables without which a job of NCCL and PyTorch cannot be frozen and brought back.

Only what this driver needs: which memory it brings back was measured on driver 580 (docs/adr/0014-launcher.md); a probe
of this machine, if there is one, overrides that. A variable that the user has set is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct

from gpucr.quantities import whole_number

IPC_SINCE_DRIVER = 610
"""The first driver that brings legacy CUDA IPC inside one job back (reported, not measured)."""

PEER_CANARIES = ("peer_access", "legacy_ipc")
VMM_CANARY = "vmm_export"
INTERPOSER_CANARY = "interposer"

_LOST = "a checkpoint seems to succeed and the restore loses the job"
_SINGLE_HOST = "a rank that has failed ends its launcher (torchrun) as before"


class EnvironmentChange(Struct, frozen=True):
    """One variable: the value that gpucr recommends, why, and what happens to a job with another value.

    ``given`` is the user's own value (None: not set). Where there is one, it stays.
    """

    variable: str
    value: str
    reason: str
    consequence: str
    given: str | None = None

    @property
    def is_set(self) -> bool:
        """Whether gpucr sets it, because the user has not."""
        return self.given is None

    @property
    def is_harmful(self) -> bool:
        """Whether the user's value differs."""
        return self.given is not None and self.given.strip() != self.value


def choose_environment(
    given: Mapping[str, str],
    *,
    driver_version: str | None,
    comes_back: Mapping[str, bool],
    io_uring_is_refused: bool,
    interposed: bool = False,
    several_nodes: bool = False,
) -> tuple[EnvironmentChange, ...]:
    """What a job needs in its environment on this machine.

    ``driver_version`` is the NVIDIA driver's (``580.159.04``); None: no driver, so nothing is chosen for NCCL.
    ``comes_back``: which of the canaries tried on this machine came back; it overrides the rules by version.
    ``io_uring_is_refused``: by a system call filter (linux/seccomp.py). ``interposed``: its programs load the
    interposer, which takes device memory out of them also where they share it. ``several_nodes``: it is one part of a
    job.
    """
    wanted: list[EnvironmentChange] = []
    if driver_version is not None:
        wanted += [_multicast()] if interposed else _nccl(driver_version, comes_back)
        wanted += _torch_timers()
        wanted += _between_nodes() if several_nodes else ()
    if not io_uring_is_refused:
        wanted.append(
            EnvironmentChange(
                "USE_LIBUV",
                "0",
                "torch's TCPStore would make an io_uring ring, and the filter that refuses it needs CAP_SYS_ADMIN",
                "CRIU cannot dump a job with an io_uring ring; suspend and resume work",
            )
        )
    return tuple(_with_given(each, given) for each in wanted)


def changed(environment: Mapping[str, str], changes: tuple[EnvironmentChange, ...]) -> dict[str, str]:
    """The environment with what gpucr sets in it."""
    return {**environment, **{each.variable: each.value for each in changes if each.is_set}}


def _multicast() -> EnvironmentChange:
    return EnvironmentChange(
        "NCCL_NVLS_ENABLE", "0", "NCCL must not use NVLink multicast memory, which no driver brings back", _LOST
    )


def _nccl(driver_version: str, comes_back: Mapping[str, bool]) -> Iterator[EnvironmentChange]:
    why_not_peer = _why_not_peer(driver_version, comes_back)
    if why_not_peer is not None:
        yield EnvironmentChange(
            "NCCL_P2P_DISABLE", "1", f"NCCL must not use memory of another GPU: {why_not_peer}", _LOST
        )
    yield _multicast()
    if comes_back.get(VMM_CANARY):
        return
    why_not_vmm = (
        "it did not come back when it was tried on this machine"
        if VMM_CANARY in comes_back
        else "no driver brings it back"
    )
    for variable, what in (("NCCL_CUMEM_ENABLE", "device"), ("NCCL_CUMEM_HOST_ENABLE", "host")):
        reason = f"NCCL must not share {what} memory through the driver's VMM functions: {why_not_vmm}"
        yield EnvironmentChange(variable, "0", reason, _LOST)


def _why_not_peer(driver_version: str, comes_back: Mapping[str, bool]) -> str | None:
    """Why memory of another GPU may not be used; None if this machine brings it back."""
    tried = [comes_back[name] for name in PEER_CANARIES if name in comes_back]
    if not all(tried):
        return "it did not come back when it was tried on this machine"
    if len(tried) == len(PEER_CANARIES):
        return None
    if _branch(driver_version) < IPC_SINCE_DRIVER:
        return f"driver {driver_version} does not bring it back"
    return f"whether driver {driver_version} brings it back has not been tried on this machine (gpucr doctor --probe)"


def _between_nodes() -> Iterator[EnvironmentChange]:
    lost = "a set of all nodes is refused"
    yield EnvironmentChange(
        "NCCL_NET", "Socket", "NCCL must talk to other nodes over TCP, which survives a dump: RDMA does not", lost
    )
    yield EnvironmentChange(
        "NCCL_MNNVL_ENABLE", "0", "NCCL must not share memory with GPUs of other nodes over NVLink", _LOST
    )


def _torch_timers() -> Iterator[EnvironmentChange]:
    """PyTorch's own timers keep running while a job is suspended.

    A restored job's continue where they stopped (ADR 17).
    """
    yield EnvironmentChange(
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        "PyTorch ends a process whose NCCL watchdog gives no sign for 8 minutes, and it gives none while suspended",
        "a job that is suspended for longer than TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC (480 s) is ended by PyTorch",
    )
    yield EnvironmentChange(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "PyTorch ends a process with a collective older than its group's timeout (10 minutes), suspended time "
        "included; " + _SINGLE_HOST,
        "PyTorch ends a job that was suspended for longer than that in the middle of a collective",
    )


def _branch(driver_version: str) -> int:
    """The number before the first dot; 0 if there is none."""
    return whole_number(driver_version.partition(".")[0]) or 0


def _with_given(change: EnvironmentChange, given: Mapping[str, str]) -> EnvironmentChange:
    return EnvironmentChange(
        change.variable, change.value, change.reason, change.consequence, given.get(change.variable)
    )
