"""The GPUs: persistence mode, and the ways of sharing one that no driver can checkpoint."""

from __future__ import annotations

from msgspec import Struct

from gpucr.checkups.checkup import ok
from gpucr.diagnosis import preflight
from gpucr.diagnosis.preflight.findings import Finding
from gpucr.driver import gpus
from gpucr.errors import DriverUnavailable
from gpucr.model import Gpu
from gpucr.quantities import format_bytes

_ABOUT = "GPUs"


class GpuFacts(Struct, frozen=True):
    """``persistence``: per UUID whether it is on (None: NVML cannot tell). ``mps``: the programs of MPS that run."""

    gpus: tuple[Gpu, ...]
    persistence: tuple[tuple[str, bool | None], ...]
    mps: tuple[str, ...]
    mps_clients: int
    problem: str | None = None


def look() -> GpuFacts:
    """Ask NVML, and look for the programs of MPS in /proc."""
    mps = preflight.mps_programs()
    try:
        with gpus.nvml_kept_open():
            found = gpus.list_gpus()
            persistence = tuple((gpu.uuid, gpus.persistence_mode(gpu.uuid)) for gpu in found)
            return GpuFacts(found, persistence, mps, len(gpus.mps_clients()))
    except DriverUnavailable as e:
        return GpuFacts((), (), mps, 0, e.message)


def check(facts: GpuFacts) -> list[Finding]:
    """Each GPU, then MPS."""
    if facts.problem is not None:
        return [
            Finding(
                "blocking",
                "the GPUs cannot be listed",
                facts.problem,
                "neither GPUs nor the memory that jobs hold on them can be seen",
                "see what `nvidia-smi` says; the driver may need a reinstall or a reboot",
                about=_ABOUT,
            )
        ]
    if not facts.gpus:
        return [
            Finding(
                "warning",
                "there is no GPU",
                "NVML lists none",
                "snapshots with GPU state cannot be restored here",
                "in a container, run it with the NVIDIA container runtime (`--gpus all`)",
                about=_ABOUT,
            )
        ]
    persistence = dict(facts.persistence)
    found = [_gpu(gpu, is_persistent=persistence.get(gpu.uuid)) for gpu in facts.gpus]
    return [*found, *_mig(facts.gpus), *_mps(facts)]


def _gpu(gpu: Gpu, *, is_persistent: bool | None) -> Finding:
    free, total = format_bytes(gpu.memory_free_bytes), format_bytes(gpu.memory_total_bytes)
    what = f"GPU {gpu.index}, {gpu.name}: {free} of {total} free"
    if is_persistent is False:
        return Finding(
            "warning",
            f"GPU {gpu.index}, {gpu.name}: persistence mode is off",
            f"NVML, {gpu.uuid}",
            "the driver's restore needs it on, or a cuInit before it: gpucr calls that, which takes longer",
            f"nvidia-smi -i {gpu.index} -pm 1",
            about=_ABOUT,
        )
    known = "on" if is_persistent else "not known"
    return ok(_ABOUT, what, f"NVML, {gpu.uuid}; persistence mode is {known}")


def _mig(machine: tuple[Gpu, ...]) -> list[Finding]:
    partitioned = [gpu for gpu in machine if gpu.mig_enabled]
    return [
        Finding(
            "blocking" if len(partitioned) == len(machine) else "warning",
            f"GPU {gpu.index}, {gpu.name}: it is partitioned (MIG)",
            f"NVML, {gpu.uuid}",
            "no driver is known to checkpoint or restore on a MIG GPU: jobs on it are refused",
            f"nvidia-smi -i {gpu.index} -mig 0, when nothing runs on it",
            code="GPUCR-MIG" if len(partitioned) == len(machine) else None,
            about=_ABOUT,
        )
        for gpu in partitioned
    ]


def _mps(facts: GpuFacts) -> list[Finding]:
    if not facts.mps and not facts.mps_clients:
        return [ok(_ABOUT, "no GPU is shared through MPS", "no program of MPS runs, and NVML lists no client")]
    return [
        Finding(
            "warning",
            "GPUs may be shared through MPS",
            ", ".join(facts.mps) or f"NVML lists {facts.mps_clients} client(s) of MPS",
            "no driver is known to checkpoint a client of MPS: such jobs are refused",
            "echo quit | nvidia-cuda-mps-control, when no client runs",
            about=_ABOUT,
        )
    ]
