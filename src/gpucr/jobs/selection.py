"""Find the job of a pid or another selector, and the driver that its CUDA processes need."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from gpucr import gang
from gpucr.diagnosis import preflight
from gpucr.driver.api import Driver
from gpucr.driver.cuda import load_driver
from gpucr.errors import DriverUnavailable, GpucrError, InvalidRequest, NotACudaProcess, ProcessNotFound
from gpucr.jobs import registered, sandbox
from gpucr.jobs.left_out import left_out
from gpucr.jobs.one_job import require_one_job
from gpucr.jobs.sandbox import Sandbox
from gpucr.jobs.selector import JobSelector
from gpucr.linux import cgroups, namespaces, processes, tcp_tables
from gpucr.linux.claims import claimed
from gpucr.linux.descriptor_limit import Reserve
from gpucr.linux.one_look import OneLook
from gpucr.linux.terminal import MASTER
from gpucr.model import Job, ProcessInfo

_DESCRIPTORS_TO_LOOK = 8


class FoundJob(Struct, frozen=True):
    """A job as found. ``driver`` is None if the machine has none; then no process can use CUDA.

    ``sandbox``: its sandbox. ``claims``: descriptors that keep other gpucr processes off it. ``has_us``: gpucr runs in
    one of its trees, and is left out. ``look``: what was seen while it was found.
    """

    job: Job
    driver: Driver | None
    sandbox: Sandbox | None = None
    claims: tuple[int, ...] = ()
    has_us: bool = False
    look: OneLook = field(default_factory=OneLook)

    def is_frozen_for(self, leave_running: bool) -> bool:
        """Whether a dump stops all of it first, and kills it when the snapshot is complete, instead of CRIU.

        So with several trees. With TCP sockets, too: a killed CRIU leaves them in a mode in which the job cannot use
        them, and it must not run before they are out of it. And for a job that has made terminals (ptys): if CRIU is to
        end it and the dump fails at the last hook, CRIU leaves them non-blocking and without what was in them (seen
        with 4.2.1), which it puts back if it is to leave the job running.
        """
        return (
            bool(self.job.other_root_pids)
            or tcp_tables.has_sockets(self.job.pids, self.look)
            or (not leave_running and any(target.endswith(MASTER) for target in self.look.files_of(self.job.pids)))
        )

    def require_cuda(self) -> Driver:
        """The driver that its CUDA processes need. Raises NotACudaProcess if none uses CUDA."""
        if self.job.gang and self.driver is not None:
            return self.driver
        root, count = self.job.root, len(self.job.processes)
        raise NotACudaProcess(
            f"process {root.pid} ({root.name}) does not use CUDA"
            if count == 1
            else f"none of the {count} processes in the tree of {root.pid} ({root.name}) uses CUDA",
            pid=root.pid,
            hint="`gpucr ps` lists the processes that do; `gpucr dump` also takes jobs without a GPU",
        )

    def require_without_us(self) -> None:
        """Raise InvalidRequest if the job cannot be stopped as a whole because this gpucr is in it."""
        if self.has_us:
            raise InvalidRequest(
                "gpucr runs in the job, and a dump would stop it, too",
                hint="run gpucr from outside the job; --force does not help here",
                code="GPUCR-OWN-JOB",
            )

    def require_one_namespace(self) -> None:
        """Raise InvalidRequest if its trees are in several pid namespaces: a restore uses one for all of them.

        Raises ProcessNotFound if one has ended.
        """
        if len({_pid_namespace(pid) for pid in self.job.root_pids}) > 1:
            roots = ", ".join(map(str, self.job.root_pids))
            raise InvalidRequest(
                f"the trees of the job (of processes {roots}) are in several pid namespaces, or sandboxes of gpucr's",
                hint=self.one_tree_instead(),
                code="GPUCR-SEVERAL-TREES",
            )

    def one_tree_instead(self) -> str:
        """What to do if several trees cannot be dumped: their launcher may be the job."""
        above = _job_above(self.job.root_pids)
        if above is not None:
            return f"dump the process that started them, with all that it started: {above.pid} ({above.name})"
        return (
            "start them under one parent (`gpucr run -- sh -c 'FIRST & SECOND & wait'`), or dump each tree by itself; "
            "`gpucr suspend --as-one` frees the GPUs of all"
        )

    def instead_of_without(self, other: int) -> str:
        """What to do if the job cannot be dumped without this process, which is not a part of it."""
        above = _job_above((*self.job.root_pids, other))
        if above is not None and above.pid in self.job.root_pids:  # adopted by the job's keeper
            name = f"{above.pid} ({above.name})"
            return f"keep what starts {other} running: it has lost its parent, so it is not below {name}"
        if above is not None:
            return f"dump the process that started both, with all that it started: {above.pid} ({above.name})"
        return "start both with one command (`gpucr run -- sh -c 'FIRST | SECOND'`), and dump that"


def _job_above(pids: Sequence[int]) -> ProcessInfo | None:
    """The lowest process that has all of these below it, or is one of them, and can be a job. No login shell."""
    lines = [{pid, *processes.ancestors(pid)} for pid in pids]
    for pid in sorted(set.intersection(*lines), key=lambda each: -len(processes.ancestors(each))):
        stat = processes.read_stat(pid)
        if stat is not None and not (stat.terminal and stat.session_id == pid):
            with contextlib.suppress(GpucrError):
                (tree,) = _trees_of(JobSelector(pid), only=False, force=False)
                return tree[0]
    return None


def find_job(
    job: int | str | JobSelector, *, only: bool = False, force: bool = False, looks_only: bool = False
) -> FoundJob:
    """The processes of a job and the CUDA state of each.

    A thread id means its process; a keeper and the name of a registered job mean the job's first process. ``only``
    excludes descendants. ``force`` also accepts processes that are not one job, ``looks_only`` one that gpucr runs in.
    Raises ProcessNotFound, InvalidRequest (also if it is not one job) or NotPermitted; changes nothing.
    """
    return _examine(_trees_of(JobSelector.of(job), only=only, force=force, looks_only=looks_only))


@contextlib.contextmanager
def claimed_job(job: int | str | JobSelector, *, only: bool = False, force: bool = False) -> Iterator[FoundJob]:
    """Like `find_job`, for an operation that changes the job: claims its processes.

    Raises Unsupported if another gpucr works on them.
    """
    trees = _trees_of(JobSelector.of(job), only=only, force=force)
    with claimed(process.pid for tree in trees for process in tree) as claims:
        yield replace(_examine(trees), claims=claims)


def _trees_of(
    selector: JobSelector, *, only: bool, force: bool, looks_only: bool = False
) -> list[tuple[ProcessInfo, ...]]:
    roots = _roots_in(selector.cgroup) if selector.cgroup is not None else [_root_of(each) for each in selector.trees]
    found = [processes.resolve_target(each, force=force, looks_only=looks_only) for each in roots]
    trees = list(processes.trees(each for each in dict.fromkeys(found) if not processes.ancestors(each) & set(found)))
    if only:
        if len(trees) > 1:
            raise InvalidRequest("--only is for one process, and several were named", hint="name one of them")
        trees = [trees[0][:1]]
    if not force:
        require_one_job(trees, cgroup=selector.cgroup)
    for root in [tree[0] for tree in trees]:
        processes.require_access(root)
    return [(tree[0], *filter(_is_there_still, tree[1:])) for tree in trees]


def _root_of(target: int | str) -> int:
    pid = registered.resolve_pid(target)
    root = sandbox.keeper_root(pid)
    return pid if root is None else root.pid


def _pid_namespace(pid: int) -> int:
    try:
        return namespaces.namespace_id(pid, "pid")
    except (FileNotFoundError, ProcessLookupError) as e:
        raise ProcessNotFound(f"process {pid} has ended meanwhile", pid=pid) from e


def _roots_in(cgroup: str) -> list[int]:
    """The processes of a cgroup whose parents are not in it. A keeper alone means its job."""
    hint = "name the folder of a cgroup below /sys/fs/cgroup in which a job runs"
    try:
        pids = cgroups.pids_in(cgroup)
    except OSError as e:
        raise InvalidRequest(f"cannot read the cgroup {cgroup}: {e.strerror}", hint=hint) from e
    if 0 in pids:
        raise InvalidRequest(
            f"the cgroup {cgroup} has processes that have no pid here", hint="run gpucr where they can be seen"
        )
    parents = {pid: stat.parent_pid for pid in pids if (stat := processes.read_stat(pid)) and stat.status not in "ZX"}
    if not parents:
        raise InvalidRequest(f"no process runs in the cgroup {cgroup}", hint=hint)
    roots = [pid for pid, parent in parents.items() if parent not in parents]
    return roots if len(roots) > 1 else [_root_of(roots[0])]


def _is_there_still(process: ProcessInfo) -> bool:
    """Whether it still exists: some jobs constantly start short-lived processes."""
    try:
        processes.require_access(process)
    except ProcessNotFound:
        return False
    return True


def _examine(trees: Sequence[tuple[ProcessInfo, ...]]) -> FoundJob:
    # Without free descriptors the driver reports that no process uses CUDA (seen on the simulator).
    Reserve(_DESCRIPTORS_TO_LOOK).release()
    everything = tuple(process for tree in trees for process in tree)
    found = tuple(process for process in everything if process.pid != os.getpid())
    look = OneLook()
    driver = load_driver_for(found, look)
    members = gang.discover(driver, found) if driver is not None else ()
    job = Job(found, members, tuple(tree[0].pid for tree in trees[1:]))
    return FoundJob(job, driver, sandbox.of(job.root.pid), has_us=len(found) < len(everything), look=look)


def load_driver_for(tree: Sequence[ProcessInfo], look: OneLook) -> Driver | None:
    """The machine's driver; None if there is none and no process of the tree has libcuda loaded."""
    try:
        return load_driver()
    except DriverUnavailable:
        if any(gang.uses_libcuda(process.pid, look) for process in tree):
            raise
        return None


def findings_for_criu(
    found: FoundJob,
    tcp: preflight.TcpMode = "close",
    *,
    leave_running: bool = False,
    is_frozen: bool = False,
    look: OneLook | None = None,
) -> list[preflight.Finding]:
    """What CRIU would refuse in the job's processes, or lose without a word: for dump, plan and doctor alike.

    What is frozen does not answer. Each says which part of the job it is `about`.
    """
    job, sandbox, look = found.job, found.sandbox, look or OneLook()
    keeper = () if sandbox is None else (sandbox.keeper.pid,)
    by_part: dict[str, Iterable[preflight.Finding]] = {
        "suspended": preflight.check_suspended(job) if job.gang and not is_frozen else (),
        "tracers": [*preflight.check_tracers(job, look), *preflight.check_limits(job)],
        "session": [
            *(finding for tree in job.trees for finding in preflight.check_session(tree, look)),
            *(preflight.check_namespace_init(job) if sandbox is None else ()),
        ],
        "namespaces": [
            *(preflight.check_root() if sandbox is None else ()),
            *preflight.check_namespaces(job, is_sandboxed=sandbox is not None, look=look),
        ],
        "left out": findings_left_out(found),
        "open files": [
            *preflight.check_open_files(job, is_sandboxed=sandbox is not None, look=look),
            *preflight.check_foreign_files(job, look),
            *(preflight.check_opencl(job) if job.gang and not is_frozen else ()),
            *preflight.check_squashed_files(job, look),
            *preflight.check_watches(job, look),
        ],
        "others": preflight.check_ties(
            job, found.instead_of_without, found.one_tree_instead, apart_from=keeper, look=look
        ),
        "connections": preflight.check_outside_connections(job, tcp, left_running=leave_running, look=look),
        "terminal": [*preflight.check_foreign_terminals(job, look), *preflight.check_interrupted(job, look)],
    }
    return [replace(finding, about=part) for part, findings in by_part.items() for finding in findings]


def findings_left_out(found: FoundJob, *, in_container: bool = False) -> list[preflight.Finding]:
    """Processes that end with the job, and are in no snapshot."""
    keeper = () if found.sandbox is None else (found.sandbox.keeper.pid,)
    others = left_out(found.job, in_container=in_container, apart_from=keeper)
    with_cuda = {member.pid for member in (gang.discover(found.driver, others) if found.driver is not None else ())}
    return preflight.check_left_out(others, with_cuda, "container" if in_container else "pid namespace")


def findings_before_freeze(job: Job, needs: Sequence[preflight.MemoryNeed]) -> list[preflight.Finding]:
    """Findings against freezing this job, including the host memory that its device memory needs."""
    return [*preflight.check_states(job), *preflight.check_left_locked(job), *preflight.check_host_memory(needs)]
