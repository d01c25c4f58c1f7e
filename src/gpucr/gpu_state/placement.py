"""The GPUs of a job's processes, what only gpucr knows about them, and where a restore takes them.

The driver knows all GPUs whose device files a process could open when it started CUDA, and requires a place for each.
After a restore elsewhere it knows others, which nothing outside the driver shows: so gpucr keeps a record per process
until the next boot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from gpucr.driver.gpus import gpu_processes, gpus_with_device_file, list_gpus, visible_gpus
from gpucr.errors import GpucrError
from gpucr.gpu_state import suspended
from gpucr.gpu_state.gpu_choice import GpuChoice, GpuRequest, GpuUser, choose_gpus
from gpucr.interposer.presence import is_interposed
from gpucr.linux import memory, processes
from gpucr.linux.process_records import ProcessRecords
from gpucr.model import CudaState, GangMember, Gpu, GpuMap, GpuUse, ProcessId
from gpucr.records import Record

if TYPE_CHECKING:
    from gpucr.gang import Gang

RECORDS = ProcessRecords("gpus")


class ProcessGpus(Struct, frozen=True):
    """The GPUs of a process. ``known``: to the driver, which requires a place for each.

    ``visible``: usable by the process. ``CUDA_VISIBLE_DEVICES`` makes fewer visible, not fewer known (measured on
    driver 580: docs/adr/hardware.md).
    """

    known: tuple[Gpu, ...]
    visible: tuple[Gpu, ...]

    def held_bytes(self, figures: Mapping[str, int], all_bytes: int) -> Mapping[str, int]:
        """Device memory per UUID of the GPUs that it uses: NVML's ``figures``, or an estimate without them.

        If it can use one GPU only, that has ``all_bytes``, its total device memory; if it can use some of those that
        the driver knows, these count as used. Empty: unknown.
        """
        if figures:
            return figures
        if len(self.visible) == 1:
            return {self.visible[0].uuid: all_bytes}
        return {} if self.visible == self.known else {gpu.uuid: 0 for gpu in self.visible}


def gpus_of(process: ProcessId, here: Sequence[Gpu], used: Collection[str] = ()) -> ProcessGpus:
    """The GPUs of a process. ``here``: those of this machine; ``used``: UUIDs on which it has memory.

    Known are those whose device files it has, which in a container may be fewer than the machine's. Visible are those
    that its interposer saw, else those that its environment names, which a program may have changed itself. All are if
    it uses one that should not be: another tool has moved it. A suspended process from another machine has that
    machine's GPUs.
    """
    noted = _recall(process)
    if noted is not None and _uuids(noted.visible) >= set(used):
        return noted
    known = _if_all_used(gpus_with_device_file(here, Path(f"/proc/{process.pid}/root")), used) or tuple(here)
    visible = _seen(process.pid, known) or visible_gpus(known, processes.environment(process.pid) or {})
    return ProcessGpus(known, _if_all_used(visible, used) or known)


def _seen(pid: int, known: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Those of ``known`` that CUDA shows to this process, by its interposer; none if that has not seen them."""
    from gpucr.interposer.client import ask_devices  # jobs without CUDA start without it

    seen = (ask_devices(pid) if is_interposed(pid) else None) or ()
    by_uuid = {gpu.uuid: gpu for gpu in known}
    return tuple(by_uuid[uuid] for uuid in seen) if by_uuid.keys() >= set(seen) else ()


def _if_all_used(gpus: tuple[Gpu, ...], used: Collection[str]) -> tuple[Gpu, ...]:
    """These GPUs; none if a used one is missing."""
    return gpus if _uuids(gpus) >= set(used) else ()


def _uuids(gpus: Iterable[Gpu]) -> set[str]:
    return {gpu.uuid for gpu in gpus}


def busy_gpus(uses: Sequence[GpuUse], own_pids: Collection[int] = ()) -> set[str]:
    """UUIDs of the GPUs that processes other than ``own_pids`` use."""
    return {use.gpu_uuid for use in uses if use.pid not in own_pids}


def all_gpus(of: Iterable[ProcessGpus]) -> list[Gpu]:
    """Each GPU that the driver knows for any of the processes, once, by index."""
    by_uuid = {gpu.uuid: gpu for gpus in of for gpu in gpus.known}
    return sorted(by_uuid.values(), key=lambda gpu: (gpu.index, gpu.uuid))


def remember_gpus(process: ProcessId, gpus: ProcessGpus) -> None:
    """Write down what a process has, before it can no longer be asked."""
    RECORDS.remove(process)
    RECORDS.write(process, _Noted(gpus.known, tuple(gpu.uuid for gpu in gpus.visible)))


class Placement:
    """Takes a gang's members to the chosen GPUs, and records their new place.

    ``gpus``: those that each member had so far, by pid, also for those that are not restored. ``here``: this machine's.
    ``suspends``: of members of a snapshot that stay suspended, what their suspend had noted, by pid.
    """

    def __init__(
        self,
        choice: GpuChoice,
        gpus: Mapping[int, ProcessGpus],
        here: Sequence[Gpu],
        suspends: Mapping[int, suspended.SuspendedRecord] = MappingProxyType({}),
    ) -> None:
        self.choice = choice
        self._gpus = gpus
        self._suspends = suspends
        self.here = tuple(here)
        self._here = {gpu.uuid: gpu for gpu in here}
        self._pids: Mapping[int, int] | None = None
        self._narrowed: set[int] = set()

    def restored_as(self, pids: Mapping[int, int]) -> None:
        """The choice was made with a snapshot's pids: ``pids`` maps them to the current ones."""
        self._pids = pids

    def visible(self, pid: int) -> tuple[Gpu, ...]:
        """The GPUs that a member could use so far, in its order."""
        gpus = self._gpus.get(self._number(pid))
        return gpus.visible if gpus is not None else ()

    def new_uuid(self, uuid: str) -> str:
        """Where this GPU's memory goes."""
        return self.choice.gpu_map.new_for(uuid) if self.choice.gpu_map is not None else uuid

    def maps(self, members: Iterable[GangMember]) -> dict[int, GpuMap]:
        """The GPU map of each member that goes to other GPUs, by pid."""
        chosen = {
            member.pid: self.choice.for_process(self._number(member.pid), used_only=member.pid in self._narrowed)
            for member in members
        }
        return {pid: gpu_map for pid, gpu_map in chosen.items() if gpu_map is not None}

    def narrow(self, gang: Gang) -> bool:
        """The driver refused maps: leave out the GPUs that those members do not use. False: there are none.

        The driver may know fewer GPUs for a process than there are device files: a cgroup can forbid opening them.
        """
        away = {member.pid for member in gang.members if not _is_back(gang, member.pid)}
        before = self.maps(gang.members)
        self._narrowed |= away
        narrower = {pid: gpu_map for pid, gpu_map in self.maps(gang.members).items() if gpu_map.pairs}
        self._narrowed &= set(narrower)
        return any(narrower[pid] != before[pid] for pid in away & set(narrower))

    def note(self, gang: Gang) -> None:
        """Record what the members have now: the new GPUs if the driver has restored them, otherwise the old ones.

        Also called after a failed restore: an undo that suspends a member again leaves it on the new GPUs.
        """
        RECORDS.remove_ended()
        maps = self.maps(gang.members)
        for member in gang.members:
            gpus = self._gpus.get(self._number(member.pid))
            if gpus is None:
                continue
            gpu_map = maps.get(member.pid)
            if gpu_map is not None and _is_back(gang, member.pid):
                gpus = ProcessGpus(self._moved(gpus.known, gpu_map), self._moved(gpus.visible, gpu_map))
                suspended.moved(member.id, gpu_map)
            remember_gpus(member.id, gpus)
            if (noted := self._suspends.get(self._number(member.pid))) is not None:
                suspended.restored(member.id, noted)

    def moved(self, gang: Gang) -> dict[int, GpuMap]:
        """The maps of those members that the driver has restored, by pid: they are on their new GPUs."""
        return {pid: gpu_map for pid, gpu_map in self.maps(gang.members).items() if _is_back(gang, pid)}

    def stayed(self, gang: Gang) -> None:
        """Record that the members went back to the GPUs that they had."""
        for member in gang.members:
            remember_gpus(member.id, self._gpus[self._number(member.pid)])

    @staticmethod
    def forget(gang: Gang) -> None:
        """Remove the records of members that have ended."""
        for member in gang.members:
            RECORDS.remove(member.id)

    def _moved(self, gpus: Iterable[Gpu], gpu_map: GpuMap) -> tuple[Gpu, ...]:
        """Where they are now, without those that the accepted map does not name."""
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
    """Where a running job's members go. ``held``: its device memory, per pid and GPU UUID.

    What it holds counts as free: it leaves every GPU before it arrives on another. Raises as `choose_gpus`.
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
    """Where a suspended job's members go. ``records``: left by their suspend, by pid.

    ``own_pids``: the job's, which do not make a GPU busy. Raises as `choose_gpus`.
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
    """The record; None if there is none, or none usable."""
    noted = RECORDS.read(process, _Noted)
    known = {gpu.uuid: gpu for gpu in noted.gpus} if noted is not None else {}
    if noted is None or not noted.visible or not known.keys() >= set(noted.visible):
        return None
    return ProcessGpus(tuple(known.values()), tuple(known[uuid] for uuid in noted.visible))
