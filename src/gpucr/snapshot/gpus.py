"""Choose the GPUs for a snapshot's job."""

from __future__ import annotations

from collections.abc import Sequence

from gpucr.gpu_state.gpu_choice import GpuRequest, GpuUser, choose_gpus, used_gpus
from gpucr.gpu_state.placement import Placement, ProcessGpus, busy_gpus
from gpucr.gpu_state.suspended import SuspendedRecord
from gpucr.model import Gpu, GpuUse
from gpucr.snapshot.manifest import Manifest


def place_snapshot(manifest: Manifest, request: GpuRequest, here: Sequence[Gpu], uses: Sequence[GpuUse]) -> Placement:
    """Where a snapshot's job goes. Processes suspended before the dump stay so, and need no GPU.

    ``uses``: which processes use which GPU of this machine. Raises like `choose_gpus`.
    """
    gpus, users = _users(manifest)
    choice = choose_gpus(request, manifest.gpus, users, here, busy_gpus(uses))
    return Placement(choice, gpus, here, _suspends(manifest))


def count_used_gpus(manifest: Manifest) -> int:
    """The number of GPUs that the job uses and needs."""
    return len(used_gpus(manifest.gpus, _users(manifest)[1]))


def _users(manifest: Manifest) -> tuple[dict[int, ProcessGpus], list[GpuUser]]:
    """The GPUs of each process that uses CUDA, and the processes that need them back."""
    gpus: dict[int, ProcessGpus] = {}
    users: list[GpuUser] = []
    for record in manifest.processes:
        if record.found_state is None:
            continue
        known = _chosen(manifest.gpus, record.known_gpus)
        gpus[record.pid] = ProcessGpus(known, _chosen(known, record.visible_gpus))
        if record.pid not in manifest.suspended_pids:
            saved_bytes = sum(data.size_bytes for data in record.device_parts.values())
            held_bytes = gpus[record.pid].held_bytes(record.device_bytes, saved_bytes)
            users.append(GpuUser(record.pid, tuple(gpu.uuid for gpu in known), held_bytes))
    return gpus, users


def _suspends(manifest: Manifest) -> dict[int, SuspendedRecord]:
    """What the suspend of each process had noted that is suspended."""
    return {
        each.pid: SuspendedRecord(each.resumes_to, each.device_bytes, each.has_hooks)
        for each in manifest.processes
        if each.resumes_to is not None
    }


def _chosen(gpus: Sequence[Gpu], uuids: Sequence[str]) -> tuple[Gpu, ...]:
    """The GPUs with these UUIDs, in their order: it is that of the process's CUDA devices."""
    known = {gpu.uuid: gpu for gpu in gpus}
    return tuple(known[uuid] for uuid in uuids if uuid in known)
