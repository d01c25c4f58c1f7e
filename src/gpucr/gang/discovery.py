"""Which processes use CUDA, and the state in which each is found."""

from __future__ import annotations

from collections.abc import Container, Iterable

from msgspec import Struct

from gpucr.driver.api import Driver
from gpucr.errors import GpucrError, Unsupported
from gpucr.linux import cgroups, memory, processes
from gpucr.model import CudaState, GangMember, ProcessInfo

HALTS = ("stopped", "frozen")
"""What a process may be instead of running: stopped by a signal or a tracer, or frozen with its cgroup."""


class Halt(Struct, frozen=True):
    """Why a process does not run: ``word`` is one of HALTS, ``hint`` how to let it run."""

    word: str
    hint: str


def discover(driver: Driver, tree: Iterable[ProcessInfo]) -> tuple[GangMember, ...]:
    """The processes of the tree that use CUDA, with the state in which each is found now.

    Only processes that have libcuda loaded are asked. Raises Unsupported for one of them that is stopped (SIGSTOP,
    Ctrl-Z, a debugger) or frozen (a container that is paused): measured on driver 580 with a stopped one, the driver's
    question then hangs until the process runs again.
    """
    members: list[GangMember] = []
    for process in tree:
        state = state_of(driver, process)
        if isinstance(state, Halt):
            named = f"process {process.pid} ({process.name})"
            raise Unsupported(
                f"{named} is {state.word}, and the driver can reach only a process that runs",
                hint=state.hint,
                code="GPUCR-STOPPED",
            )
        if state is not None:
            members.append(GangMember(process.id, state))
    return tuple(members)


def state_of(driver: Driver, process: ProcessInfo) -> CudaState | Halt | None:
    """The process's CUDA state, or what keeps the driver from telling; None where it has none, or has ended."""
    if not uses_libcuda(process.pid):
        return None
    return _halt_of(process.pid) or _state_if_alive(driver, process)


def _halt_of(pid: int) -> Halt | None:
    stat = processes.read_stat(pid)
    if stat is not None and stat.status in "Tt":
        return Halt("stopped", f"continue it with `kill -CONT {pid}`, or detach the debugger that holds it")
    cgroup = cgroups.frozen_by(pid)
    if cgroup is not None:
        return Halt("frozen", f"resume the container; its cgroup {cgroup} is frozen")
    return None


def uses_libcuda(pid: int) -> bool:
    """Whether the process has the driver's library loaded: only such a process can have a CUDA state."""
    return memory.has_mapped(pid, "/libcuda.so")


def uses_gpu(pid: int, holders: Container[int]) -> bool:
    """Whether a process whose state is RUNNING has anything on a GPU. ``holders``: the pids that NVML knows.

    NVML calls alone give a process that state (driver 580); cuInit maps device files (docs/adr/hardware.md).
    """
    return pid in holders or memory.has_mapped(pid, "/dev/nvidia")


def _state_if_alive(driver: Driver, process: ProcessInfo) -> CudaState | None:
    try:
        return driver.state(process.pid)
    except GpucrError:
        if processes.keeps_running(process.id):
            raise
        return None  # it ended between the listing and the question
