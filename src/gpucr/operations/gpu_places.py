"""Where the processes of a job are on GPUs, what of it only gpucr knows, and where a restore takes them.

``CUDA_VISIBLE_DEVICES`` says which GPUs a process could see when it started. After a restore with a GPU map it sees
others, and nothing outside of the driver tells which: so gpucr keeps a note of it, which belongs to the process and
lasts until the next boot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict

from gpucr.driver.gpus import visible_gpus
from gpucr.errors import GpucrError
from gpucr.gang import Gang
from gpucr.linux import processes
from gpucr.model import CudaState, Gpu, GpuMap, GpuUse, ProcessId
from gpucr.operations import suspended
from gpucr.operations.gpu_choice import GpuChoice, GpuRequest, GpuUser, choose_gpus
from gpucr.operations.process_records import ProcessRecords
from gpucr.snapshot.manifest import Manifest, ProcessRecord

RECORDS = ProcessRecords("gpus")


def seen_by(process: ProcessId, here: Sequence[Gpu], used: Collection[str] = ()) -> tuple[Gpu, ...]:
    """The GPUs that a process can see. ``here``: those of this machine; ``used``: UUIDs on which it has memory.

    All of the machine where nothing better is known, and where it uses one that it should not see: another tool has
    moved it, or it has changed its own environment. GPUs of another machine for a process that came from there and is
    suspended.
    """
    noted = _recall(process)
    environment = processes.environment(process.pid) or {}
    seen = noted if noted is not None else visible_gpus(here, environment)
    return seen if {gpu.uuid for gpu in seen} >= set(used) and seen else tuple(here)


def busy_gpus(uses: Sequence[GpuUse], own_pids: Collection[int] = ()) -> set[str]:
    """UUIDs of the GPUs on which processes other than ``own_pids`` compute."""
    return {use.gpu_uuid for use in uses if use.pid not in own_pids}


def all_gpus(seen: Iterable[Sequence[Gpu]]) -> list[Gpu]:
    """Each GPU that any of the processes can see, once, by index."""
    by_uuid = {gpu.uuid: gpu for gpus in seen for gpu in gpus}
    return sorted(by_uuid.values(), key=lambda gpu: (gpu.index, gpu.uuid))


class Placement:
    """Takes the members of a gang to the GPUs that were chosen, and notes where they are then.

    ``seen``: the GPUs that each member could see so far, by pid, also of those that are not restored.
    """

    def __init__(self, choice: GpuChoice, seen: Mapping[int, Sequence[Gpu]], here: Sequence[Gpu]) -> None:
        self.choice = choice
        self._seen = seen
        self._here = {gpu.uuid: gpu for gpu in here}
        self._pids: Mapping[int, int] | None = None
        self._narrowed: set[int] = set()

    def restored_as(self, pids: Mapping[int, int]) -> None:
        """The choice was made with the pids of a snapshot: ``pids`` says, once they are there, which each has now."""
        self._pids = pids

    def maps(self, gang: Gang) -> dict[int, GpuMap]:
        """The GPU map of each member that goes to other GPUs, by pid."""
        chosen = {
            member.pid: self.choice.for_process(self._number(member.pid), used_only=member.pid in self._narrowed)
            for member in gang.members
        }
        return {pid: gpu_map for pid, gpu_map in chosen.items() if gpu_map is not None}

    def narrow(self, gang: Gang) -> bool:
        """The driver refused maps: for those members leave out the GPUs that they do not use. False: there are none.

        A program that sets CUDA_VISIBLE_DEVICES itself, before it uses CUDA, sees fewer than its environment shows.
        """
        away = {member.pid for member in gang.members if not _is_back(gang, member.pid)}
        before = self.maps(gang)
        self._narrowed |= away
        narrower = {pid: gpu_map for pid, gpu_map in self.maps(gang).items() if gpu_map.pairs}
        self._narrowed &= set(narrower)
        return any(narrower[pid] != before[pid] for pid in away & set(narrower))

    def note(self, gang: Gang) -> None:
        """Keep what the members see now: the new GPUs where the driver has restored them, else still the old ones.

        Called after a restore that failed as well: an undo that suspends a member again leaves it on the new GPUs.
        """
        RECORDS.remove_ended()
        maps = self.maps(gang)
        for member in gang.members:
            gpus = self._seen.get(self._number(member.pid))
            if gpus is None:
                continue
            gpu_map = maps.get(member.pid)
            if gpu_map is not None and _is_back(gang, member.pid):
                seen = dict(gpu_map.pairs) if member.pid in self._narrowed else [gpu.uuid for gpu in gpus]
                gpus = [self._here.get(gpu_map.new_for(gpu.uuid), gpu) for gpu in gpus if gpu.uuid in seen]
                suspended.moved(member.id, gpu_map)
            RECORDS.remove(member.id)
            RECORDS.write(member.id, {"gpus": [asdict(gpu) for gpu in gpus]})

    def _number(self, pid: int) -> int:
        if self._pids is None:
            return pid
        return next(before for before, now in self._pids.items() if now == pid)


def place_snapshot(manifest: Manifest, request: GpuRequest, here: Sequence[Gpu], uses: Sequence[GpuUse]) -> Placement:
    """Where the job of a snapshot goes. What was suspended before the dump stays so, and needs no GPU.

    ``uses``: who computes on which GPU of this machine. Raises as `choose_gpus` does.
    """
    everything = tuple(gpu.uuid for gpu in manifest.gpus)
    seen: dict[int, tuple[Gpu, ...]] = {}
    users: list[GpuUser] = []
    for record in manifest.processes:
        if record.found_state is None:
            continue
        visible = set(everything if record.visible_gpus is None else record.visible_gpus)
        gpus = seen[record.pid] = tuple(gpu for gpu in manifest.gpus if gpu.uuid in visible)
        if record.found_state is not CudaState.CHECKPOINTED:
            users.append(GpuUser(record.pid, tuple(gpu.uuid for gpu in gpus), _held(record, gpus)))
    return Placement(choose_gpus(request, manifest.gpus, users, here, busy_gpus(uses)), seen, here)


def _held(record: ProcessRecord, gpus: Sequence[Gpu]) -> Mapping[str, int]:
    """Device memory per GPU. Where NVML had no figures and only one GPU is possible, all that was saved."""
    if not record.device_bytes and record.device_data is not None and len(gpus) == 1:
        return {gpus[0].uuid: record.device_data.size_bytes}
    return record.device_bytes


def _is_back(gang: Gang, pid: int) -> bool:
    try:
        return not gang.is_stuck(pid) and gang.state(pid) in (CudaState.RUNNING, CudaState.LOCKED)
    except GpucrError:
        return False


def _recall(process: ProcessId) -> tuple[Gpu, ...] | None:
    """What was noted; None where nothing was, or nothing that can be used."""
    try:
        noted = RECORDS.read(process)["gpus"]
        return tuple(_gpu(item) for item in noted)
    except (KeyError, TypeError, ValueError):
        return None


def _gpu(item: Mapping[str, object]) -> Gpu:
    kinds = {"index": int, "uuid": str, "name": str, "memory_total_bytes": int, "memory_free_bytes": int}
    if not all(type(item[name]) is kind for name, kind in kinds.items()) or type(item["mig_enabled"]) is not bool:
        raise ValueError("not a GPU")
    return Gpu(**item)  # type: ignore[arg-type]  # checked above; a member too many is a TypeError
