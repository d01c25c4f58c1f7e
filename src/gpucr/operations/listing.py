"""Who uses CUDA on this machine, and in which state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from msgspec import Struct, field

from gpucr.driver import own_use
from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.driver.gpus import gpu_processes
from gpucr.errors import GpucrError, NotACudaProcess
from gpucr.gang import Halt, state_of, uses_gpu
from gpucr.gpu_state.held import device_bytes_here
from gpucr.gpu_state.ways import GpuState, first_choice
from gpucr.jobs import selection
from gpucr.jobs.selector import JobSelector
from gpucr.linux import memory, processes
from gpucr.linux.tmpfs import KEPT_NAME
from gpucr.model import CudaState, ProcessInfo


class ProcessState(Struct, frozen=True):
    """One process. ``state`` is None if it does not use CUDA; ``device_bytes`` is per GPU UUID.

    ``halt`` is ``stopped`` (by a signal or a tracer) or ``frozen`` (with its cgroup) if it has the driver's library
    loaded but cannot be queried; then the state is None too.

    ``age_s`` is the time since its start or restore. ``way`` is how its device memory would leave the GPU (None: it
    does not run); preflight may find a reason against that.
    """

    process: ProcessInfo
    state: CudaState | None
    resident_bytes: int
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    age_s: float = 0.0
    halt: str | None = None
    way: GpuState | None = None

    @property
    def word(self) -> str | None:
        """Its state or halt, in a word; None if it does not use CUDA."""
        return self.state.word if self.state is not None else self.halt


def list_cuda_processes() -> tuple[ProcessState, ...]:
    """Every process on the machine that uses CUDA and that the caller may inspect, including suspended ones.

    Excludes programs that only watch GPUs through NVML, and gpucr itself. A stopped or frozen process is listed with
    its ``halt`` if it has the driver's library loaded.

    Raises DriverUnavailable if there is no driver with the checkpoint functions.
    """
    driver = load_driver()
    held = device_bytes_here(gpu_processes())
    found: list[ProcessState] = []
    for pid in sorted(processes.all_pids()):
        if pid == os.getpid():  # NVML may have given it a CUDA state just now (driver 580)
            continue
        with contextlib.suppress(GpucrError, PermissionError):  # ended meanwhile, or another user's
            process = processes.describe(pid)
            state = state_of(driver, process)
            if isinstance(state, Halt):
                found.append(_describe(process, None, held, driver, state.word))
            elif state is not None and _has_cuda(pid, state, held):
                found.append(_describe(process, state, held, driver))
    return tuple(found)


def _has_cuda(pid: int, state: CudaState, held: Mapping[int, Mapping[str, int]]) -> bool:
    """Whether a process with a CUDA state really uses CUDA: it may only have called NVML, or be gpucr."""
    return state is not CudaState.RUNNING or (
        uses_gpu(pid, held) and not own_use.is_gpucrs(pid, had_memory=pid in held)
    )


def job_states(pid: int | str | JobSelector, *, only: bool = False) -> tuple[ProcessState, ...]:
    """The CUDA state of every process in the tree of ``pid``, or of the registered job of this name
    (``only``: of the one process). Changes nothing.

    Raises NotACudaProcess if none of them uses CUDA.
    """
    found = selection.find_job(pid, only=only, looks_only=True)
    job = found.job
    if not job.gang:
        raise NotACudaProcess(
            f"process {job.root.pid} ({job.root.name}) does not use CUDA, and none of its descendants does"
            if not only
            else f"process {job.root.pid} ({job.root.name}) does not use CUDA",
            pid=job.root.pid,
            hint="`gpucr ps` lists the processes that do",
        )
    driver = load_driver()
    states = {member.pid: member.found for member in job.gang}
    held = device_bytes_here(gpu_processes())
    return tuple(_describe(process, states.get(process.pid), held, driver) for process in job.processes)


def _describe(
    process: ProcessInfo,
    state: CudaState | None,
    held: Mapping[int, Mapping[str, int]],
    driver: Driver,
    halt: str | None = None,
) -> ProcessState:
    # It has not touched the file that custom storage makes it keep.
    kept_bytes = memory.mapped_bytes(process.pid, f"/{KEPT_NAME}") if state is CudaState.CHECKPOINTED else 0
    return ProcessState(
        process,
        state,
        memory.resident_bytes(process.pid) + kept_bytes,
        held.get(process.pid, {}),
        processes.age_s(process.id),
        halt,
        first_choice(process.pid, driver) if state is CudaState.RUNNING else None,
    )
