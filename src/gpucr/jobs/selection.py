"""Finding the job that a pid stands for, and the driver that its CUDA processes need."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpucr import gang
from gpucr.diagnosis import preflight
from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.errors import DriverUnavailable, InvalidRequest, ProcessNotFound
from gpucr.jobs import registered, sandbox
from gpucr.jobs.one_job import require_one_job
from gpucr.jobs.sandbox import Sandbox
from gpucr.linux import processes
from gpucr.linux.claims import claimed
from gpucr.linux.descriptor_limit import Reserve
from gpucr.model import Job, ProcessInfo

LONGEST_TIMEOUT_S = 1e6
"""Eleven days. poll(2) takes its milliseconds as an int, which ends at twenty-four."""


_DESCRIPTORS_TO_LOOK = 8


@dataclass(frozen=True)
class FoundJob:
    """A job as it was found. ``driver`` is None where the machine has none; then no process can use CUDA.

    ``sandbox`` is the one that it lives in. ``claims`` are the descriptors that keep other gpucr's off it.
    """

    job: Job
    driver: Driver | None
    sandbox: Sandbox | None = None
    claims: tuple[int, ...] = ()


def find_job(pid: int | str, *, only: bool = False) -> FoundJob:
    """The tree of ``pid`` and the CUDA state of each of its processes.

    A thread id stands for its process, a keeper and the name of a registered job for the job's first one. ``only``
    leaves the descendants out. Raises ProcessNotFound, InvalidRequest (also for a tree that is not one job) or
    NotPermitted; changes nothing.
    """
    return _examine(_tree_of(pid, only=only))


@contextlib.contextmanager
def claimed_job(pid: int | str, *, only: bool = False) -> Iterator[FoundJob]:
    """As `find_job`, for an operation that changes the job: no other gpucr works on its processes meanwhile.

    Raises Unsupported where another one does.
    """
    tree = _tree_of(pid, only=only)
    with claimed(process.pid for process in tree) as claims:
        yield replace(_examine(tree), claims=claims)


def _tree_of(pid: int | str, *, only: bool) -> tuple[ProcessInfo, ...]:
    target = registered.resolve_pid(pid)
    root = sandbox.keeper_root(target)
    tree = processes.tree(processes.resolve_target(target if root is None else root.pid))
    if only:
        tree = tree[:1]
    require_one_job(tree)
    processes.require_access(tree[0])
    return (tree[0], *filter(_is_there_still, tree[1:]))


def _is_there_still(process: ProcessInfo) -> bool:
    """Whether it has not ended since the tree was listed: some jobs start and end small processes all the time."""
    try:
        processes.require_access(process)
    except ProcessNotFound:
        return False
    return True


def _examine(tree: tuple[ProcessInfo, ...]) -> FoundJob:
    # Without descriptors the driver says of every process that it does not use CUDA (seen on the simulator).
    Reserve(_DESCRIPTORS_TO_LOOK).release()
    driver = load_driver_for(tree)
    members = gang.discover(driver, tree) if driver is not None else ()
    return FoundJob(Job(tree, members), driver, sandbox.of(tree[0].pid))


def load_driver_for(tree: Sequence[ProcessInfo]) -> Driver | None:
    """The machine's driver; None where there is none and no process of the tree has libcuda loaded."""
    try:
        return load_driver()
    except DriverUnavailable:
        if any(gang.uses_libcuda(process.pid) for process in tree):
            raise
        return None


def deadline_after(timeout_s: float | None) -> float | None:
    """The time.monotonic() value at which ``timeout_s`` seconds from now are over."""
    if timeout_s is None:
        return None
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise InvalidRequest(
            f"a timeout of {timeout_s} s cannot be met",
            hint=f"give a number of seconds above 0 and up to {LONGEST_TIMEOUT_S:.0f}, or none at all",
        )
    return time.monotonic() + timeout_s


def findings_before_freeze(job: Job, needs: Sequence[preflight.MemoryNeed]) -> list[preflight.Finding]:
    """What stands in the way of freezing this job, with the host memory that its device memory needs."""
    return [*preflight.check_states(job), *preflight.check_host_memory(needs)]
