"""The GPUs that device memory is on, and those that it goes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpucr.diagnosis.preflight.findings import Finding
from gpucr.model import Gpu, GpuMap, GpuUse, Job
from gpucr.quantities import format_bytes


def device_bytes_in_use(job: Job, uses: Sequence[GpuUse]) -> dict[int, dict[str, int]]:
    """Device memory per process and GPU UUID, of the job's processes (NVML's figures, where it has them)."""
    pids = {member.pid for member in job.gang}
    found: dict[int, dict[str, int]] = {}
    for use in uses:
        if use.pid in pids and use.used_bytes is not None:
            by_gpu = found.setdefault(use.pid, {})
            by_gpu[use.gpu_uuid] = by_gpu.get(use.gpu_uuid, 0) + use.used_bytes
    return found


def check_gpus(
    snapshot_gpus: Sequence[Gpu], needed_bytes: Mapping[str, int], here: Sequence[Gpu], gpu_map: GpuMap | None
) -> list[Finding]:
    """Whether this machine's GPUs can take what the GPUs held that the snapshot's job had.

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
                Finding(
                    "blocking" if not needed_bytes or old.uuid in needed_bytes else "warning",
                    f"the snapshot needs GPU {new_uuid} ({old.name})",
                    f"this machine has {have}",
                    "there is nowhere to put its device memory",
                    "let gpucr choose with --gpu auto, or name this machine's GPUs with --gpu-map OLD=NEW",
                    code="GPUCR-NO-GPU",
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
                Finding(
                    "blocking",
                    f"GPU {new.uuid} has {format_bytes(new.memory_free_bytes)} free",
                    f"the job held {format_bytes(needed)} on it",
                    f"{format_bytes(needed - new.memory_free_bytes)} are missing; running out would lose the job",
                    "end or suspend what uses that GPU, or choose another one with --gpu auto or --gpu-map",
                    code="GPUCR-GPU-FULL",
                )
            )
    return found


def _compare(old: Gpu, new: Gpu) -> list[Finding]:
    if new.name == old.name:
        return []
    return [
        Finding(
            "blocking",
            f"GPU {new.uuid} is a {new.name}",
            f"the job ran on a {old.name}",
            "the driver restores only to the same kind of GPU",
            "choose a GPU of the same kind with --gpu-map",
            code="GPUCR-OTHER-MODEL",
        )
    ]
