"""The GPUs that device memory is on, and those that it goes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.diagnosis.preflight.support import gpu_use as facts
from gpucr.model import Gpu, GpuMap
from gpucr.quantities import format_bytes


def check_gpus(
    snapshot_gpus: Sequence[Gpu], needed_bytes: Mapping[str, int], here: Sequence[Gpu], gpu_map: GpuMap | None
) -> list[Finding]:
    """Whether this machine's GPUs can hold what the snapshot's GPUs held.

    ``needed_bytes`` is the device memory per GPU UUID of the snapshot. Empty: NVML had no figures, so every GPU counts.
    """
    present = {gpu.uuid: gpu for gpu in here}
    have = ", ".join(f"{gpu.uuid} ({gpu.name})" for gpu in here) or "no GPU"
    found: list[Finding] = []
    for old in snapshot_gpus:
        new_uuid = gpu_map.new_for(old.uuid) if gpu_map else old.uuid
        new = present.get(new_uuid)
        if new is None:
            found.append(
                facts.NO_GPU.seen(
                    f"this machine has {have}",
                    as_warning=bool(needed_bytes) and old.uuid not in needed_bytes,
                    gpu=new_uuid,
                    model=old.name,
                )
            )
            continue
        found.extend(_compare(old, new))
    return found + check_room(needed_bytes, here, gpu_map)


def check_room(needed_bytes: Mapping[str, int], here: Sequence[Gpu], gpu_map: GpuMap | None) -> list[Finding]:
    """Free memory of the GPUs that device memory goes to. ``needed_bytes``: per UUID of the GPU where it was."""
    present = {gpu.uuid: gpu for gpu in here}
    found: list[Finding] = []
    for old_uuid, needed in needed_bytes.items():
        new = present.get(gpu_map.new_for(old_uuid) if gpu_map else old_uuid)
        if new is not None and new.memory_free_bytes < needed:
            found.append(
                facts.GPU_FULL.seen(
                    f"the job held {format_bytes(needed)} on it",
                    gpu=new.uuid,
                    free=format_bytes(new.memory_free_bytes),
                    missing=format_bytes(needed - new.memory_free_bytes),
                )
            )
    return found


def _compare(old: Gpu, new: Gpu) -> list[Finding]:
    if new.name == old.name:
        return []
    return [facts.OTHER_MODEL.seen(f"the job ran on a {old.name}", gpu=new.uuid, model=new.name)]
