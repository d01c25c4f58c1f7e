"""Where the processes of a job are on GPUs, what of it only gpucr knows, and where a restore takes them.

The driver knows all GPUs whose device files a process could open when it started CUDA, and wants a place for each.
After a restore elsewhere it knows others, and nothing outside of the driver tells which: so gpucr keeps a note of it,
which belongs to the process and lasts until the next boot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gpucr.driver.gpus import gpu_processes, gpus_with_device_file, list_gpus, visible_gpus
from gpucr.errors import GpucrError
from gpucr.gpu_state import suspended
from gpucr.gpu_state.gpu_choice import GpuChoice, GpuRequest, GpuUser, choose_gpus
from gpucr.linux import memory, processes
from gpucr.linux.process_records import ProcessRecords
from gpucr.model import CudaState, GangMember, Gpu, GpuMap, GpuUse, ProcessId
from gpucr.records import Record

if TYPE_CHECKING:
    from gpucr.gang import Gang

RECORDS = ProcessRecords("gpus")


class ProcessGpus(Struct, frozen=True):
    """The GPUs of a process. ``known``: to the driver, which wants a place for each. ``visible``: it can use these.

    ``CUDA_VISIBLE_DEVICES`` makes fewer visible, not fewer known (measured on driver 580: docs/hardware.md).
    """

    known: tuple[Gpu, ...]
    visible: tuple[Gpu, ...]

    def held_bytes(self, figures: Mapping[str, int], all_bytes: int) -> Mapping[str, int]:
        """Device memory per UUID of the GPUs that it uses: NVML's ``figures``, or what can be said without them.

        Where it can use one GPU only, that is ``all_bytes``, its device memory in all; where it can use some of those
        that the driver knows, these count as used. Empty: nothing is known.
        """
        if figures:
            return figures
        if len(self.visible) == 1:
            return {self.visible[0].uuid: all_bytes}
        return {} if self.visible == self.known else {gpu.uuid: 0 for gpu in self.visible}


def gpus_of(process: ProcessId, here: Sequence[Gpu], used: Collection[str] = ()) -> ProcessGpus:
    """The GPUs of a process. ``here``: those of this machine; ``used``: UUIDs on which it has memory.

    Known are those whose device files it has, which in a container may be fewer than the machine's. All of these are
    visible where nothing better is known, and where it uses one that should not be: another tool has moved it, or it
    has changed its own environment. GPUs of another machine for a process that came from there and is suspended.
    """
    noted = _recall(process)
    if noted is not None and _uuids(noted.visible) >= set(used):
        return noted
    known = _if_all_used(gpus_with_device_file(here, Path(f"/proc/{process.pid}/root")), used) or tuple(here)
    visible = visible_gpus(known, processes.environment(process.pid) or {})
    return ProcessGpus(known, _if_all_used(visible, used) or known)


def _if_all_used(gpus: tuple[Gpu, ...], used: Collection[str]) -> tuple[Gpu, ...]:
    """These GPUs; none, where not all of the used ones are among them."""
    return gpus if _uuids(gpus) >= set(used) else ()


def _uuids(gpus: Iterable[Gpu]) -> set[str]:
    return {gpu.uuid for gpu in gpus}


def busy_gpus(uses: Sequence[GpuUse], own_pids: Collection[int] = ()) -> set[str]:
    """UUIDs of the GPUs on which processes other than ``own_pids`` compute."""
    return {use.gpu_uuid for use in uses if use.pid not in own_pids}


def all_gpus(of: Iterable[ProcessGpus]) -> list[Gpu]:
    """Each GPU that the driver knows for any of the processes, once, by index."""
    by_uuid = {gpu.uuid: gpu for gpus in of for gpu in gpus.known}
    return sorted(by_uuid.values(), key=lambda gpu: (gpu.index, gpu.uuid))


class Placement:
    """Takes the members of a gang to the GPUs that were chosen, and notes where they are then.

    ``gpus``: those that each member had so far, by pid, also of those that are not restored. ``here``: this machine's.
    """

    def __init__(self, choice: GpuChoice, gpus: Mapping[int, ProcessGpus], here: Sequence[Gpu]) -> None:
        self.choice = choice
        self._gpus = gpus
        self.here = tuple(here)
        self._here = {gpu.uuid: gpu for gpu in here}
        self._pids: Mapping[int, int] | None = None
        self._narrowed: set[int] = set()

    def restored_as(self, pids: Mapping[int, int]) -> None:
        """The choice was made with the pids of a snapshot: ``pids`` says, once they are there, which each has now."""
        self._pids = pids

    def visible(self, pid: int) -> tuple[Gpu, ...]:
        """The GPUs that a member could use so far, in its order."""
        gpus = self._gpus.get(self._number(pid))
        return gpus.visible if gpus is not None else ()

    def new_uuid(self, uuid: str) -> str:
        """Where memory of this GPU goes."""
        return self.choice.gpu_map.new_for(uuid) if self.choice.gpu_map is not None else uuid

    def maps(self, gang: Gang) -> dict[int, GpuMap]:
        """The GPU map of each member that goes to other GPUs, by pid."""
        chosen = {
            member.pid: self.choice.for_process(self._number(member.pid), used_only=member.pid in self._narrowed)
            for member in gang.members
        }
        return {pid: gpu_map for pid, gpu_map in chosen.items() if gpu_map is not None}

    def narrow(self, gang: Gang) -> bool:
        """The driver refused maps: for those members leave out the GPUs that they do not use. False: there are none.

        The driver may know fewer GPUs for a process than there are device files: a cgroup can forbid to open them.
        """
        away = {member.pid for member in gang.members if not _is_back(gang, member.pid)}
        before = self.maps(gang)
        self._narrowed |= away
        narrower = {pid: gpu_map for pid, gpu_map in self.maps(gang).items() if gpu_map.pairs}
        self._narrowed &= set(narrower)
        return any(narrower[pid] != before[pid] for pid in away & set(narrower))

    def note(self, gang: Gang) -> None:
        """Keep what the members have now: the new GPUs where the driver has restored them, else still the old ones.

        Called after a restore that failed as well: an undo that suspends a member again leaves it on the new GPUs.
        """
        RECORDS.remove_ended()
        maps = self.maps(gang)
        for member in gang.members:
            gpus = self._gpus.get(self._number(member.pid))
            if gpus is None:
                continue
            gpu_map = maps.get(member.pid)
            if gpu_map is not None and _is_back(gang, member.pid):
                gpus = ProcessGpus(self._moved(gpus.known, gpu_map), self._moved(gpus.visible, gpu_map))
                suspended.moved(member.id, gpu_map)
            self._write(member, gpus)

    def moved(self, gang: Gang) -> dict[int, GpuMap]:
        """The maps of those members that the driver has restored, by pid: they are on their new GPUs."""
        return {pid: gpu_map for pid, gpu_map in self.maps(gang).items() if _is_back(gang, pid)}

    def stayed(self, gang: Gang) -> None:
        """Keep that the members have the GPUs that they had: they went back."""
        for member in gang.members:
            self._write(member, self._gpus[self._number(member.pid)])

    def _write(self, member: GangMember, gpus: ProcessGpus) -> None:
        RECORDS.remove(member.id)
        RECORDS.write(member.id, _Noted(gpus.known, tuple(gpu.uuid for gpu in gpus.visible)))

    def _moved(self, gpus: Iterable[Gpu], gpu_map: GpuMap) -> tuple[Gpu, ...]:
        """Where they are now; without those that the map, which the driver has taken, does not name."""
        new = dict(gpu_map.pairs)
        return tuple(self._here.get(new[gpu.uuid], gpu) for gpu in gpus if gpu.uuid in new)

    def _number(self, pid: int) -> int:
        if self._pids is None:
            return pid
        return next(before for before, now in self._pids.items() if now == pid)


def _is_back(gang: Gang, pid: int) -> bool:
    try:
        return not gang.is_stuck(pid) and gang.state(pid) in (CudaState.RUNNING, CudaState.LOCKED)
    except GpucrError:
        return False


def place_moved(members: Sequence[GangMember], held: Mapping[int, Mapping[str, int]], request: GpuRequest) -> Placement:
    """Where the members of a job go that runs. ``held``: its device memory, per pid and GPU UUID.

    What it holds counts as free: it has left every GPU before it comes to another one. Raises as `choose_gpus`.
    """
    here = _without(held, list_gpus())
    gpus = {member.pid: gpus_of(member.id, here, used=held.get(member.pid, {})) for member in members}
    users = [
        GpuUser(pid, tuple(gpu.uuid for gpu in each.known), each.held_bytes(held.get(pid, {}), 0))
        for pid, each in gpus.items()
    ]
    busy = busy_gpus(gpu_processes(), list(gpus)) if request.auto else ()
    return Placement(choose_gpus(request, all_gpus(gpus.values()), users, here, busy), gpus, here)


def _without(held: Mapping[int, Mapping[str, int]], gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """These GPUs as they are when the job is off them."""
    return tuple(
        replace(gpu, memory_free_bytes=gpu.memory_free_bytes + sum(each.get(gpu.uuid, 0) for each in held.values()))
        for gpu in gpus
    )


def place_suspended(
    members: Sequence[GangMember],
    records: Mapping[int, suspended.SuspendedRecord | None],
    request: GpuRequest,
    here: Sequence[Gpu],
    own_pids: Collection[int],
) -> Placement:
    """Where members of a job go that come back. ``records``: what their suspend has left, by pid.

    ``own_pids``: the job's, which keep no GPU busy. Raises as `choose_gpus`.
    """
    gpus: dict[int, ProcessGpus] = {}
    users: list[GpuUser] = []
    for member in members:
        record = records[member.pid]
        figures = record.device_bytes if record is not None else {}
        mine = gpus[member.pid] = gpus_of(member.id, here, used=figures)
        # Suspended by another tool: staging is the largest mapping of nearly every process.
        held_bytes = mine.held_bytes(figures, 0 if figures else memory.largest_anonymous_bytes(member.pid))
        users.append(GpuUser(member.pid, tuple(gpu.uuid for gpu in mine.known), held_bytes))
    busy = busy_gpus(gpu_processes(), own_pids) if request.auto else ()
    return Placement(choose_gpus(request, all_gpus(gpus.values()), users, here, busy), gpus, here)


class _Noted(Record, frozen=True):
    gpus: tuple[Gpu, ...]
    visible: tuple[str, ...]


def _recall(process: ProcessId) -> ProcessGpus | None:
    """What was noted; None where nothing was, or nothing that can be used."""
    noted = RECORDS.read(process, _Noted)
    known = {gpu.uuid: gpu for gpu in noted.gpus} if noted is not None else {}
    if noted is None or not noted.visible or not known.keys() >= set(noted.visible):
        return None
    return ProcessGpus(tuple(known.values()), tuple(known[uuid] for uuid in noted.visible))
