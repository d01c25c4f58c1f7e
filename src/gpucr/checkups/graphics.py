"""The GPUs: persistence mode, and the ways of sharing one that no driver can checkpoint."""

from __future__ import annotations

from msgspec import Struct

from gpucr.checkups import catalogue
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
        return [catalogue.GPUS_NOT_LISTED.seen(facts.problem)]
    if not facts.gpus:
        return [catalogue.NO_GPU.seen("NVML lists none")]
    persistence = dict(facts.persistence)
    found = [_gpu(gpu, is_persistent=persistence.get(gpu.uuid)) for gpu in facts.gpus]
    return [*found, *_mig(facts.gpus), *_mps(facts)]


def _gpu(gpu: Gpu, *, is_persistent: bool | None) -> Finding:
    free, total = format_bytes(gpu.memory_free_bytes), format_bytes(gpu.memory_total_bytes)
    what = f"GPU {gpu.index}, {gpu.name}: {free} of {total} free"
    if is_persistent is False:
        return catalogue.NO_PERSISTENCE.seen(f"NVML, {gpu.uuid}", index=gpu.index, name=gpu.name)
    known = "on" if is_persistent else "not known"
    return ok(_ABOUT, what, f"NVML, {gpu.uuid}; persistence mode is {known}")


def _mig(machine: tuple[Gpu, ...]) -> list[Finding]:
    partitioned = [gpu for gpu in machine if gpu.mig_enabled]
    return [
        catalogue.MIG.seen(
            f"NVML, {gpu.uuid}", as_warning=len(partitioned) < len(machine), index=gpu.index, name=gpu.name
        )
        for gpu in partitioned
    ]


def _mps(facts: GpuFacts) -> list[Finding]:
    if not facts.mps and not facts.mps_clients:
        return [ok(_ABOUT, "no GPU is shared through MPS", "no program of MPS runs, and NVML lists no client")]
    return [catalogue.MPS.seen(", ".join(facts.mps) or f"NVML lists {facts.mps_clients} client(s) of MPS")]
