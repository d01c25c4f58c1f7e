"""A job's GPU use, as visible from outside: gathered once, judged by the checks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from msgspec import Struct

from gpucr.driver import gpus
from gpucr.errors import ProcessNotFound
from gpucr.gang import uses_gpu
from gpucr.interposer import owners
from gpucr.interposer.client import ask_status
from gpucr.interposer.owners import Sharing
from gpucr.interposer.presence import is_interposed
from gpucr.interposer.protocol import Status
from gpucr.linux import memory, processes
from gpucr.model import CudaState, Gpu, GpuUse, Job, ProcessInfo

_UVM_DEVICE = "/dev/nvidia-uvm"


class CudaTraits(Struct, frozen=True):
    """One CUDA process.

    ``environment`` is that of its start (None: not readable), ``mapped`` the paths of the files that it has mapped,
    ``gpus`` the UUIDs of those on which it holds memory (None: NVML does not know the process, as in most containers),
    ``uvm_mappings`` number of mappings of ``/dev/nvidia-uvm``; ``counted``: its interposer's counters (None: none, or
    no answer); ``has_agent``: it has an interposer that should answer. ``found``: its CUDA state, if it is of the job.
    """

    process: ProcessInfo
    environment: Mapping[str, str] | None
    mapped: frozenset[str]
    open_paths: frozenset[str]
    gpus: frozenset[str] | None
    uvm_mappings: int = 0
    counted: Status | None = None
    found: CudaState | None = None
    has_agent: bool = False

    @property
    def pid(self) -> int:
        """The pid in the caller's namespace."""
        return self.process.pid

    @property
    def own_pid(self) -> int:
        """The pid as the process itself sees it."""
        return self.process.ns_pids[-1]

    @property
    def knows_all(self) -> bool:
        """Whether its interposer has seen every call."""
        return self.counted is not None and not self.counted.around

    def setting(self, variable: str) -> str | None:
        """A variable of its environment; None if it is not set or the environment cannot be read."""
        return None if self.environment is None else self.environment.get(variable)

    def mapped_with(self, part: str) -> str | None:
        """A mapped file whose path has this part."""
        return next((path for path in sorted(self.mapped) if part in path), None)


class JobTraits(Struct, frozen=True):
    """The CUDA processes of a job, and NVML's data about the machine. ``mps_clients``: pids as NVML sees them.

    ``relatives`` have device memory but are outside the job: its ancestors, and their other descendants. ``sharing``:
    shared memory according to all of their interposers (None: some do not answer).
    """

    processes: tuple[CudaTraits, ...]
    machine: tuple[Gpu, ...]
    unreachable: frozenset[frozenset[str]] = frozenset()
    mps_clients: frozenset[int] = frozenset()
    relatives: tuple[CudaTraits, ...] = ()
    sharing: Sharing | None = None

    def can_reach(self, uuids: frozenset[str]) -> bool:
        """Whether any two of these GPUs may be able to read each other's memory: true unless NVML denies it."""
        ordered = sorted(uuids)
        pairs = (frozenset((one, other)) for n, one in enumerate(ordered) for other in ordered[n + 1 :])
        return any(pair not in self.unreachable for pair in pairs)


def look(job: Job, uses: Sequence[GpuUse]) -> JobTraits:
    """Gather the traits of a job, those of its processes aside that only ask NVML. Changes nothing.

    ``uses``: which process holds memory on which GPU.

    Raises DriverUnavailable if NVML is there and broken.
    """
    if not job.gang:
        return JobTraits((), ())
    found = {member.pid: member.found for member in job.gang}
    holders = {use.pid for use in uses}
    seen = tuple(
        _look_at(each, uses, found[each.pid])
        for each in job.processes
        if each.pid in found and (found[each.pid] is not CudaState.RUNNING or uses_gpu(each.pid, holders))
    )
    relatives: list[CudaTraits] = []
    for process in _relatives(job, holders):
        with contextlib.suppress(PermissionError):  # another user's: it shares nothing with this one
            relatives.append(_look_at(process, uses))
    return JobTraits(
        seen,
        gpus.list_gpus(),
        gpus.unreachable_pairs(),
        gpus.mps_clients(),
        tuple(relatives),
        _sharing(seen, relatives),
    )


def _sharing(seen: Sequence[CudaTraits], relatives: Sequence[CudaTraits]) -> Sharing | None:
    told = [each.pid for each in (*seen, *relatives) if each.knows_all]
    imports = any(each.counted.imported for each in (*seen, *relatives) if each.counted is not None)
    return owners.ask(told) if imports else Sharing({}, ())


def _relatives(job: Job, holders: set[int]) -> list[ProcessInfo]:
    """Those of ``holders`` in the job's trees, or in those of the first ancestors of its roots among ``holders``."""
    tops = set()
    for root in job.root_pids:
        above = processes.ancestors(root) & holders - {1}
        tops.add(min(above, key=lambda pid: len(processes.ancestors(pid)), default=root))
    try:
        trees = processes.trees(sorted(tops))
    except ProcessNotFound:  # one has just ended
        return []
    found = {process.pid: process for tree in trees for process in tree}
    return [found[pid] for pid in sorted(holders.difference(job.pids) & found.keys())]


def _look_at(process: ProcessInfo, uses: Sequence[GpuUse], found: CudaState | None = None) -> CudaTraits:
    try:
        paths = [mapping.path for mapping in memory.read_maps(process.pid) if mapping.path]
    except (FileNotFoundError, ProcessLookupError):
        paths = []
    return CudaTraits(
        process=process,
        environment=processes.environment(process.pid),
        mapped=frozenset(paths),
        open_paths=frozenset(file.target for file in processes.open_files(process.pid)),
        gpus=frozenset(use.gpu_uuid for use in uses if use.pid == process.pid) or None,
        uvm_mappings=paths.count(_UVM_DEVICE),
        counted=ask_status(process.pid) if (has_agent := is_interposed(process.pid)) else None,
        has_agent=has_agent,
        found=found,
    )
