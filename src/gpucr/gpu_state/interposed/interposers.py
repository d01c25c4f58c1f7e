"""The interposed processes of an operation: which of them use it, and their common work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gpucr.driver.api import Driver
from gpucr.errors import InterposerError, Unsupported
from gpucr.gang import uses_gpu
from gpucr.gpu_state.backend import INTERPOSED
from gpucr.gpu_state.holders import Holders, StateOf
from gpucr.gpu_state.interposed.backend import Goes, Interposed, carried_by
from gpucr.gpu_state.interposed.guarded import Guarded
from gpucr.gpu_state.interposed.host_copy import HostCopy
from gpucr.gpu_state.interposed.keeping import Keeping, KeepsNothing
from gpucr.gpu_state.interposed.lending import Lending
from gpucr.gpu_state.interposed.line import GatedLock, Line, held_by_another
from gpucr.gpu_state.interposed.shared import (
    find_shares,
    keep_shares,
    share_again,
)
from gpucr.gpu_state.source import SavedLater, Saver
from gpucr.gpu_state.ways import GpuState, refused
from gpucr.interposer import foreign
from gpucr.interposer.client import Agent, Held, ask_status
from gpucr.interposer.presence import has_library, is_interposed
from gpucr.interposer.protocol import BadAnswer, Code, Refused
from gpucr.interposer.sharing import Part, Share
from gpucr.interposer.vault import Vaults
from gpucr.linux import processes
from gpucr.linux.tmpfs import StagingFile
from gpucr.model import CudaState, DevicePart, GangMember, GpuMap, ProcessId
from gpucr.quantities import counted
from gpucr.undo.steps import Meter

WITHOUT = "it was started without one"
NO_AGENT = "no call of CUDA has come to it, or it could make no socket for gpucr"


class Interposers(Holders):
    """The interposed processes of an operation. ``uuids_of``: the GPUs that a process sees, in its order.

    ``gpu_state``: the way that a user insists on. ``moves``: the processes come back on other GPUs. ``wait_saved``: set
    if they run again before their memory is saved; waits for that. ``saver``: saves their memory. ``lending``: what
    ends if their programs need device memory while they run. ``shares``: the memory that they share, found when they
    were stopped.
    """

    def __init__(
        self,
        driver: Driver,
        uuids_of: Callable[[ProcessId], Sequence[str]],
        guarded: Guarded,
        *,
        to_host: bool,
        moves: bool = False,
        gpu_state: GpuState = "auto",
        wait_saved: Callable[[], object] | None = None,
        saver: Saver | None = None,
    ) -> None:
        self._driver = driver
        self._uuids_of = uuids_of
        self._guarded = guarded
        self.vaults = self._vaults = Vaults()
        self.keeping = Keeping(self._vaults, wait_saved) if wait_saved is not None else KeepsNothing(self._vaults)
        self._goes = Goes(to_host, moves, saver or SavedLater(), self.keeping)
        self._is_saved = saver is not None
        self.copies: dict[int, HostCopy] = {}
        """By pid, what processes suspended earlier keep, which is saved too."""
        self.lending: Lending | None = None
        self._backends: dict[int, Interposed | None] = {}
        self._gpu_state = gpu_state
        self._why_not: dict[int, str] = {}
        self.shares: tuple[Share, ...] = ()
        self._looked_at: set[int] = set()

    def require(self, members: Iterable[GangMember], held: Mapping[int, Mapping[str, int]]) -> None:
        """Raise Unsupported if one of these running processes would go another way, and that loses it.

        Or if the user insists on this one. A process without memory to take is left to the driver if another one goes
        this way: torch.compile's workers have a context, and who only asks NVML has nothing (`uses_gpu`).
        ``held``: their device memory, per pid and GPU UUID.
        """
        running = [member.pid for member in members if member.found is CudaState.RUNNING]
        go = [pid for pid in running if self.of(pid) is not None]
        for pid in running:
            if pid not in go:
                self._require_own(pid)
        if self._gpu_state != INTERPOSED:
            return
        for pid in running:
            why = self._why_not.get(pid, WITHOUT)
            has_none = why == foreign.NOTHING_TO_LEAVE or not uses_gpu(pid, held)
            if pid not in go and not (go and has_none):
                raise refused(
                    f"device memory of process {pid} cannot leave by an interposer: {why}",
                    "start the job with `gpucr run`",
                )

    def _require_own(self, pid: int) -> None:
        status = ask_status(pid) if is_interposed(pid) else None
        if status is not None and status.foreign:
            blocks = counted(status.foreign, "block")
            raise Unsupported(
                f"process {pid} has {blocks} of imported device memory, and only its interposer can take that: "
                + self._why_not.get(pid, "another way was asked for"),
                hint=f"leave the way to gpucr (`--gpu-state auto`); `gpucr doctor {pid}` says what keeps memory there",
                code=foreign.CODE,
            )

    def of(self, pid: int) -> Interposed | None:
        """The backend for this running process; None if it has no usable interposer."""
        if pid not in self._backends:
            self._backends[pid] = self._find(pid)
        return self._backends[pid]

    def those_of(self, pids: Iterable[int]) -> list[Interposed]:
        """The backends for these running processes."""
        return [each for each in map(self.of, pids) if each is not None]

    def backend_for(self, part: DevicePart) -> Interposed | None:
        return self.of(part.pid)  # the first above the driver

    def note(self, pid: int) -> str | None:
        why = self._why_not.get(pid)
        return f"process {pid}: device memory leaves by the driver, not by an interposer: {why}" if why else None

    def room_of(self, part: DevicePart, size_bytes: int) -> StagingFile:
        """The file in memory that will hold this part when its process is suspended. Raises OSError."""
        (backend,) = self.those_of([part.pid])
        return backend.room_of(size_bytes)

    def carried(self, pids: Iterable[int]) -> dict[str, int]:
        """How much they would take from these processes, in bytes per GPU UUID."""
        total: dict[str, int] = {}
        for backend in self.those_of(pids):
            for uuid, size_bytes in backend.carries.items():
                total[uuid] = total.get(uuid, 0) + size_bytes
        return total

    def left_to_driver(self, held: Mapping[int, Mapping[str, int]]) -> dict[int, dict[str, int]]:
        """What they would not take of this device memory, by pid and GPU UUID: the driver brings it back."""
        left: dict[int, dict[str, int]] = {}
        for pid, by_gpu in held.items():
            taken = [each.carries for each in self.those_of([pid])]
            left[pid] = {
                uuid: max(0, size_bytes - sum(each.get(uuid, 0) for each in taken))
                for uuid, size_bytes in by_gpu.items()
            }
        return left

    def kept_by(self, pid: int, meter: Meter) -> HostCopy | None:
        """Its copy in host memory, if that is to be saved. Raises InterposerError, JobChanged."""
        stat = processes.read_stat(pid) if self._is_saved else None
        if stat is None:
            return None
        found = HostCopy.of(pid, self._uuids_of(ProcessId(pid, stat.start_time_ticks)))
        if found is not None:
            self.copies[pid] = found
        return found

    @contextlib.contextmanager
    def agent_of(self, pid: int) -> Iterator[Agent]:
        """The agent of this process during the block: it serves one client at a time. Raises as `Agent`."""
        found = self._backends.get(pid)
        if found is not None and found.line.is_open:
            yield found.line.agent
            return
        with Agent(pid) as agent:
            yield agent

    def rank(self, pid: int) -> GatedLock | None:
        """The locks that hold this process."""
        found = self._backends.get(pid) or self.of(pid)
        return found.lock if found is not None else None

    def _find(self, pid: int) -> Interposed | None:
        if self._gpu_state not in ("auto", INTERPOSED) or self._driver.state(pid) is not CudaState.RUNNING:
            return None
        if not is_interposed(pid):
            if has_library(pid):
                self._why_not[pid] = NO_AGENT
            return None
        stat = processes.read_stat(pid)
        if stat is None:
            return None
        uuids = self._uuids_of(ProcessId(pid, stat.start_time_ticks))
        part, line = DevicePart(pid, 1), Line(pid)
        try:
            why_not = foreign.why_by_driver(line.agent.status())
            carries = carried_by(line, uuids)
        except (Refused, BadAnswer, OSError, InterposerError) as e:  # another version: treat as not interposed
            if isinstance(e, Refused) and e.code == Code.BUSY:
                raise held_by_another(pid) from e
            why_not = str(e)
        finally:
            line.hang_up()  # until it is needed: preflight calls the agent too
        if why_not is not None:
            self._why_not[pid] = why_not
            return None
        return Interposed(
            part, self._driver, uuids, carries, self._vaults, self._guarded, self._goes, self._before_first
        )

    def _before_first(self) -> None:
        """All are stopped, with their memory: find out who shares whose memory, and let them keep that record."""
        new = {pid: each for pid, each in self._backends.items() if each is not None and pid not in self._looked_at}
        if not new:
            return
        others = {
            pid: self._why_not.get(pid, WITHOUT)
            for pid, each in self._backends.items()
            if each is None and self._driver.state(pid) is CudaState.LOCKED
        }
        lines = [each.line for each in new.values()]
        shares = find_shares(lines, others)
        for each in new.values() if shares else ():
            each.tell_guard()
        keep_shares(lines, shares)
        self._looked_at |= new.keys()
        self.shares += shares

    def given_back(self, state: StateOf) -> None:
        """Give processes that have their own memory again what they shared, and open their gates.

        Raises GpucrError: then none of them continues.
        """
        out = [each for each in self._backends.values() if each is not None and each.is_out]
        states = {each.part.pid: state(each.part.pid) for each in out}
        back = [each for each in out if states[each.part.pid] not in (CudaState.CHECKPOINTED, None)]
        if not back:
            return
        held: dict[Part, Held] = {}
        for each in out:
            if states[each.part.pid] is None:
                held |= each.held
        share_again(self._driver, [each.line for each in back], held)
        self._guarded.going_on([each.part.pid for each in back])
        for each in back:
            each.go_on()

    def moved(self, maps: Mapping[int, GpuMap]) -> None:
        """The driver has restored these processes, by pid, on other GPUs."""
        for pid, gpu_map in maps.items():
            backend = self._backends.get(pid)
            if backend is not None:
                backend.moved(gpu_map)

    def is_given_back(self) -> bool:
        """Whether one of them has its memory again."""
        return any(backend is not None and backend.is_given_back for backend in self._backends.values())

    def close(self) -> None:
        """Close the backends and the vaults."""
        for backend in self._backends.values():
            if backend is not None:
                backend.close()
        self._vaults.close()
        if self.lending is not None:
            self.lending.end()

    def withdrawn(self) -> list[Interposed]:
        """Wait until gpucr itself can use CUDA; the backends that cannot do without.

        None if the user insists on this way: then the error comes when it is needed. Raises Unsupported if the driver
        would lose one.
        """
        gone: list[Interposed] = []
        for pid, each in list(self._backends.items()):
            if each is None or self._gpu_state != "auto" or (error := each.failure()) is None:
                continue
            self._backends[pid], self._why_not[pid] = None, str(error)
            each.close()
            each.needs_nothing()
            self._require_own(pid)
            gone.append(each)
        return gone
