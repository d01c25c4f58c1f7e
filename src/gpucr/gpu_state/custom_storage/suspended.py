"""Memory kept by processes that custom storage has suspended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gpucr.errors import CustomStorageError, GpucrError, Unsupported, reason_of
from gpucr.gang import Gang
from gpucr.gang.around import Around
from gpucr.gpu_state import suspended
from gpucr.gpu_state.custom_storage import kept
from gpucr.gpu_state.custom_storage.backend import bring_back
from gpucr.gpu_state.custom_storage.client import Carrier
from gpucr.gpu_state.custom_storage.holding import PAGE_BYTES
from gpucr.gpu_state.recovery import GangProtection
from gpucr.gpu_state.ways import no_custom_storage
from gpucr.interposer.vault import VAULT_BYTES
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import CudaState, GpuMap, ProcessId


def needed_with_carrier(needed_bytes: Mapping[str, int], pids: Iterable[int]) -> dict[str, int]:
    """What a resume needs on each GPU, by UUID, including the context of the carrier."""
    room = VAULT_BYTES if any(kept.find(pid) is not None for pid in pids) else 0
    return {uuid: size_bytes + room for uuid, size_bytes in needed_bytes.items()}


def require_way_back(pids: Iterable[int]) -> None:
    """Raise Unsupported if these keep memory that cannot be restored here. Changes nothing."""
    if (why_not := no_custom_storage()) is None:
        return
    for pid in pids:
        if kept.find(pid) is not None:
            raise Unsupported(
                f"process {pid} was suspended by custom storage, and comes back by that alone: {why_not}",
                hint="run gpucr as root, with the driver that it was suspended with",
                code="GPUCR-BACKEND",
            )


class SuspendedStorage(Around):
    """Restores them from that memory. ``uuids_of``: the GPUs that a process sees, in its order."""

    def __init__(self, uuids_of: Callable[[int], Sequence[str]], guarded: GangProtection) -> None:
        self._uuids_of = uuids_of
        self._guarded = guarded
        self._carrier: Carrier | None = None

    def bring_back(self, gang: Gang, maps: Mapping[int, GpuMap | None]) -> dict[int, Exception | None]:
        """CHECKPOINTED → LOCKED, and free what they kept."""
        members = {member.pid: member.id for member in gang.members}
        files: dict[int, StagingFile] = {}
        try:
            for pid in maps:
                if gang.state(pid) is CudaState.CHECKPOINTED and (file := kept.open_kept(pid)) is not None:
                    files[pid] = file
            if not files:
                return {}
            mine = {members[pid]: maps[pid] for pid in files}
            carrier = self._started(mine)
            self._guarded.carried(carrier.id, files)
            for pid, file in files.items():
                size_bytes = max(file.size_bytes, PAGE_BYTES)
                carrier.place(members[pid], [file.fd], size_bytes, is_whole=True, keeps_itself=True)
            results = bring_back(carrier, mine)
            for pid in files:
                if results[pid] is None:
                    _let_go(gang, pid)
                elif gang.state(pid) is CudaState.CHECKPOINTED:
                    carrier.of("forget", members[pid])  # it stays suspended, and can be resumed later
        except (GpucrError, OSError) as e:
            failure = (
                e if isinstance(e, GpucrError) else CustomStorageError(f"what was kept cannot be read: {reason_of(e)}")
            )
            return dict.fromkeys(files or maps, failure)
        finally:
            for file in files.values():
                file.close()
        return results

    def _started(self, mine: Mapping[ProcessId, GpuMap | None]) -> Carrier:
        if self._carrier is None:
            self._carrier = Carrier(sorted({uuid for each, where in mine.items() for uuid in self._gpus(each, where)}))
        return self._carrier

    def _gpus(self, process: ProcessId, gpu_map: GpuMap | None) -> Iterable[str]:
        record = suspended.recall(process)
        found = (record.device_bytes if record is not None else None) or self._uuids_of(process.pid)
        return [gpu_map.new_for(uuid) if gpu_map is not None else uuid for uuid in found]

    def before_climb(self, gang: Gang, pid: int) -> None:
        """The driver takes its memory again: what it still keeps is stale."""
        _let_go(gang, pid)

    def close(self) -> None:
        if self._carrier is not None:
            self._carrier.close()


def _let_go(gang: Gang, pid: int) -> None:
    if kept.find(pid) is not None:
        kept.let_go(pid, gang.driver.restore_thread_id(pid))
